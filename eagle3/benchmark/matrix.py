"""The measurements of a benchmark: draft tokens x requests in flight x temperature x prompt set, and their repeats.

Each is known by what decides it, so that one which is done stays done when a value is added to an axis. What concerns
all of them (the models, the engine and its arguments, the longest reply) is the stage's own fingerprint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3.common import files

BASELINE, AGAIN, DRAFTER, CONTROL = "baseline", "baseline-again", "drafter", "control"
# Options that decide which measurements there are, not what one gives: they never make finished ones stale.
AXES = tuple(f"benchmark.{name}" for name in (
    "prompts", "prompt_sets", "draft_tokens", "concurrency", "temperature", "repeats", "baseline_again", "predict",
    "control"))


@dataclass(frozen=True)
class ServerKind:
    """A server that is started once: the verifier alone, or with a drafter and a number of draft tokens."""

    role: str
    draft_tokens: int = 0

    @property
    def name(self) -> str:
        """In file names and logs, such as baseline or drafter-3."""
        return f"{self.role}-{self.draft_tokens}" if self.draft_tokens else self.role


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        prompts: name of the prompt set. identity: hash of its prompts. drafter: hash of the control's files, "" for
            other servers (the drafter's is in the stage's fingerprint). repeat: from 1.
    """

    server: ServerKind
    concurrency: int
    temperature: float
    prompts: str
    identity: str
    drafter: str = ""
    repeat: int = 1

    def key(self) -> dict[str, Any]:
        """Return what decides this measurement, as it is kept with it."""
        return {"server": self.server.role, "draft_tokens": self.server.draft_tokens, "concurrency": self.concurrency,
                "temperature": self.temperature, "prompts": self.prompts, "prompts_identity": self.identity,
                "control_identity": self.drafter, "repeat": self.repeat}

    def name(self, first_set: str) -> str:
        """Return the file name: drafter-3_c8, and what differs from temperature 0, the first set, the first repeat."""
        parts = [self.server.name, f"c{self.concurrency}", f"t{self.temperature:g}" if self.temperature else "",
                 self.prompts if self.prompts != first_set else "", f"r{self.repeat}" if self.repeat > 1 else ""]
        return "_".join(part for part in parts if part)


KEY = tuple(Cell(ServerKind(BASELINE), 1, 0.0, "", "").key())
GROUP = ("concurrency", "temperature", "prompts")  # what a measurement and its baseline share


def key_of(run: dict[str, Any]) -> str:
    """Return the identity of a kept measurement among those of its stage."""
    return files.sha256_json([run.get(name) for name in KEY])


def group_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return the load of a measurement: requests in flight, temperature, prompt set."""
    return tuple(run[name] for name in GROUP)


def cell_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what repeats of one measurement share."""
    return (run["server"], run["draft_tokens"], *group_of(run))


@dataclass(frozen=True)
class Matrix:
    """What is asked for.

    Attributes:
        servers: in the order in which they are started. sets: {name: identity} in order. control: hash of the
            control's files, "" without one.
    """

    servers: list[ServerKind]
    concurrency: list[int]
    temperatures: list[float]
    sets: dict[str, str]
    repeats: int
    control: str = ""

    def cells(self, server: ServerKind) -> Iterator[Cell]:
        """Yield a server's measurements; repeats come round by round, so that a drift is in their spread."""
        for repeat in range(1, (1 if server.role == AGAIN else self.repeats) + 1):
            for name, identity in self.sets.items():
                for temperature in self.temperatures:
                    for concurrency in self.concurrency:
                        yield Cell(server, concurrency, temperature, name, identity,
                                   self.control if server.role == CONTROL else "", repeat)

    def missing(self, server: ServerKind, kept: list[dict[str, Any]]) -> list[Cell]:
        """Return a server's measurements that are not among the kept ones.

        The verifier's at the end have to be younger than what was measured with a drafter under the same load (where
        its age is known), or they would not be the end.
        """
        done = {key_of(run): run for run in kept}
        cells = list(self.cells(server))
        if server.role != AGAIN:
            return [cell for cell in cells if files.sha256_json(list(cell.key().values())) not in done]
        drafted: dict[tuple[Any, ...], str] = {}
        ended: dict[tuple[Any, ...], str] = {}
        for run in kept:
            ages = ended if run["server"] == AGAIN else drafted if run["draft_tokens"] else {}
            ages[group_of(run)] = max(ages.get(group_of(run), ""), run.get("measured_at", ""))
        return [cell for cell in cells if (age := drafted.get(group_of(cell.key()))) is None
                or age > ended.get(group_of(cell.key()), "")]

    def all_missing(self, kept: list[dict[str, Any]]) -> dict[ServerKind, list[Cell]]:
        """Return what a run would measure, server by server."""
        found, known = {}, list(kept)
        for kind in self.servers:
            found[kind] = self.missing(kind, known)
            known += [cell.key() | {"measured_at": "later"} for cell in found[kind]]
        return found

    def shown(self, run: dict[str, Any]) -> bool:
        """Say whether a kept measurement belongs to the results: not with prompts or a control that are others now."""
        wanted = self.sets.get(run["prompts"], run["prompts_identity"])
        control = run["server"] != CONTROL or run["control_identity"] == self.control
        return run["prompts_identity"] == wanted and control


def servers(draft_tokens: list[int], *, control: bool, again: bool) -> list[ServerKind]:
    """Return the servers of a benchmark: the verifier alone first and, to show drift, last."""
    drafted = [ServerKind(DRAFTER, count) for count in draft_tokens]
    drafted += [ServerKind(CONTROL, count) for count in draft_tokens] if control else []
    return [ServerKind(BASELINE), *drafted, *([ServerKind(AGAIN)] if again else [])]
