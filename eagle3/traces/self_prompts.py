"""Prompts from nothing: a verifier that reads its template up to where the user speaks says what users say.

Known as Magpie (Z. Xu et al., arXiv 2406.08464). What is sampled there is cleaned (eagle3/traces/prompt_cleaning.py)
and becomes the run's prompts. Lies beside the traces:
  self_attempts.jsonl   every text that was sampled, a line as soon as it is there: a killed run loses what is in flight
  self_prompts.json     settings, seed, and what came of the attempts, by reason
  self_prompts.jsonl    the usable ones, by the number of their request: the prompts of stage 01
Which prompts come out depends on the engine's answers alone, not on their order: request k has a seed made of the seed
and k, attempts are judged in the order of k, and the first N usable ones are taken.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError, StaleError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import GenerateSection
from eagle3.traces.prompt_cleaning import Attempt, Cleaner

PREFIX = "self:"
PROMPTS, ATTEMPTS, RECORD = "self_prompts.jsonl", "self_attempts.jsonl", "self_prompts.json"
SCHEMA_VERSION = 1
_FIELDS = {"number": int, "text": str, "tokens": int, "ended": str, "control": bool}  # of a line of ATTEMPTS
_LABEL = 40  # characters of an opening or a system prompt by which its prompts are called


def count_of(prompts: str) -> int | None:
    """Return how many prompts `self:N` asks for, None for any other source; UsageError when N is no number."""
    if not prompts.startswith(PREFIX):
        return None
    wanted = prompts.removeprefix(PREFIX).replace("_", "")
    if not wanted.isdecimal() or not int(wanted):
        raise UsageError("not a number of prompts", where="--prompts", expected="self:N, such as self:20000",
                         found=prompts)
    return int(wanted)


@dataclass(frozen=True)
class Kind:
    """What a request begins with: a system prompt and the user's first words, either of them "" for none."""

    system: str
    opening: str

    @property
    def source(self) -> str:
        """What its prompts are called in the data report."""
        label = " | ".join(part[:_LABEL] for part in (self.system, self.opening) if part)
        return f"self: {label}" if label else "self"


@dataclass(frozen=True)
class Plan:
    """Which prompts are to be invented.

    Attributes:
        count: usable prompts. held_out: texts that they must not come near.
        settings: all else that decides them, for self_prompts.json; a run adds the identity of the model.
    """

    count: int
    section: GenerateSection
    held_out: list[str]
    settings: dict[str, Any]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds; request k has the k-th in turn."""
        section = self.section
        return [Kind(system, opening) for opening in section.self_openings or [""]
                for system in section.self_systems or [""]]

    @property
    def tokens(self) -> tuple[int, int]:
        """The shortest and the longest prompt."""
        shortest, longest = self.section.self_tokens
        return shortest, longest

    def seed(self, number: int) -> int:
        """Return the sampling seed of a request: 31 bits, which every engine takes."""
        return files.hash64(f"{self.section.self_seed} {number}") >> 33

    def row(self, attempt: Attempt) -> dict[str, Any]:
        """Return an attempt as a row of a prompts file."""
        kind = self.kinds[attempt.number % len(self.kinds)]
        kept = kind.system if self.section.self_keep_system else ""
        messages = [{"role": "system", "content": kept}] * bool(kept)
        messages.append({"role": "user", "content": attempt.text.strip()})
        return {"id": f"self-{self.section.self_seed}-{attempt.number}", "source": kind.source, "messages": messages}


def plan(section: GenerateSection, held_out_files: list[str], limit: int | None = None,
         held_out: Iterable[str] = ()) -> Plan | None:
    """Return what `self:N` asks for, None for another source of prompts.

    Args:
        held_out_files: prompts that must not be come near, besides --self-held-out. held_out: texts likewise.
    Raises:
        UsageError, PreconditionError: options contradict each other, or a held-out file cannot be read.
    """
    count = count_of(section.prompts)
    if count is None:
        return None
    shortest, longest = section.self_tokens
    if shortest > longest:
        raise UsageError("the shortest prompt is longer than the longest", where="--self-tokens",
                         found=f"{shortest} {longest}", fix="give the shorter one first")
    paths = dict.fromkeys(Path(name).resolve() for name in [*held_out_files, *section.self_held_out])
    if missing := [path for path in paths if not path.exists()]:
        raise PreconditionError("a file of held-out prompts is missing", where=missing[0],
                                fix="correct --self-held-out, or benchmark.prompts in the configuration")
    texts = list(dict.fromkeys(chain(held_out, *map(_texts, paths))))
    settings = {name: value for name, value in asdict(section).items()
                if name.startswith("self_") and name != "self_held_out"}
    settings |= {"chat_template_kwargs": section.chat_template_kwargs,
                 "held_out": files.sha256_json(sorted(texts))}
    return Plan(min(count, limit or count), section, texts, settings)


def _texts(path: Path) -> Iterator[str]:
    """Yield what users say in a source of prompts, message by message."""
    from eagle3.traces.prompts import PromptSource

    for conversation in PromptSource(GenerateSection(prompts=str(path), turns="all")):
        yield from (message["content"] for message in conversation.messages
                    if message["role"] == "user" and message["content"])


def recorded(directory: Path) -> dict[str, Any] | None:
    """Return what came of inventing the prompts of a folder, None where none were invented or not all yet."""
    known = files.read_json(directory / RECORD) if (directory / RECORD).is_file() else {}
    return known if isinstance(known, dict) and "usable" in known else None


class Record:
    """What lies in a folder of prompts that were invented: attempts, and how many of them are usable."""

    def __init__(self, plan: Plan, directory: Path, *, read: bool = True) -> None:
        """Read it; nothing without `read`.

        Raises StaleError when it was made with other settings, PreconditionError when it is damaged.
        """
        self.plan, self.directory = plan, directory
        self.attempts: dict[int, Attempt] = {}
        self._known: dict[str, Any] = {}
        if not read or not (directory / RECORD).exists():
            return
        self._known = files.read_json(directory / RECORD, fix="use --restart (moves the old aside)")
        self._refuse_other(self._known.get("settings") if isinstance(self._known, dict) else None)
        for line, row in files.read_jsonl(directory / ATTEMPTS):
            if {name: type(value) for name, value in row.items()} != _FIELDS:
                raise PreconditionError("an attempt is damaged", where=f"{directory / ATTEMPTS} line {line}",
                                        expected=", ".join(f"{name} ({_FIELDS[name].__name__})" for name in _FIELDS),
                                        found=f"{row!r:.80}", fix="remove that line: only that request is sent again")
            self.attempts.setdefault(row["number"], Attempt(**row))

    @property
    def prompts(self) -> Path:
        """The prompts file."""
        return self.directory / PROMPTS

    @property
    def complete(self) -> bool:
        """Whether the prompts file holds all that is wanted, as it was written."""
        known = self._known
        return (known.get("usable", 0) >= self.plan.count and self.prompts.is_file()
                and known.get("sha256") == files.sha256_file(self.prompts))

    def begin(self) -> None:
        """Write the settings down before the first attempt."""
        if not self._known:
            self._write({})

    def finish(self, usable: list[int], cleaner: Cleaner, judged: int) -> None:
        """Write the prompts file and what came of the attempts; attempts beyond the last one judged are dropped.

        Args:
            usable: numbers of the usable attempts, ascending. judged: attempts that were looked at, from number 0.
        """
        kept = [self.attempts[number] for number in range(judged)]
        files.write_bytes(self.directory / ATTEMPTS, b"".join(files.encode_line(asdict(each)) for each in kept))
        rows = [self.plan.row(self.attempts[number]) for number in usable]
        files.write_bytes(self.prompts, b"".join(map(files.encode_line, rows)))
        tokens = sum(attempt.tokens for attempt in kept)
        self._write({"attempts": judged, "usable": len(usable), "tokens": tokens, "left_out": cleaner.figures(),
                     "sha256": files.sha256_file(self.prompts)})
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in cleaner.reasons.most_common()) or "none"
        logger.info("%d of %d attempts are usable prompts (%.1f%%): %s; left out: %s", len(usable), judged,
                    100 * len(usable) / max(1, judged), self.prompts, reasons)

    def figures(self) -> dict[str, Any]:
        """Return what the manifest says of them."""
        return {name: value for name, value in self._known.items() if name not in ("schema_version", "sha256")}

    def _write(self, figures: dict[str, Any]) -> None:
        self._known = {"schema_version": SCHEMA_VERSION, "settings": self.plan.settings} | figures
        files.write_json(self.directory / RECORD, self._known)

    def _refuse_other(self, known: Any) -> None:
        known = known if isinstance(known, dict) else {}
        ours = self.plan.settings
        changed = [name for name in ours if known.get(name) != ours[name]]
        if changed:
            raise StaleError(
                "the prompts there were invented with other settings", where=self.directory / RECORD,
                found="\n".join(f"{name}: {known.get(name)} → {ours[name]}" for name in changed),
                fix="take the old settings, write elsewhere with --out, or use --restart (moves the old aside)")
