"""Prompts: what the verifier is asked, conversation by conversation, from any source.

A row is `{"messages": [{"role", "content"}]}`, ShareGPT's `{"conversations": [{"from", "value"}]}` or
`{"prompt": "text"}`, with `id`, `tools` and `source` where it has them. `rows` says what a row means,
`sources` where rows come from; here it is decided which of them are asked.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.files import hash64, sha256_json
from eagle3.common.log import logger
from eagle3.common.options import GenerateSection
from eagle3.traces import sources
from eagle3.traces.prompt_rows import Conversation, Dropped, Malformed, Reader, given_id

_CHECK_ROWS = 256  # rows between two looks at whether to stop
Shape = Callable[[sources.Placed], sources.Placed]


@dataclass
class Counts:
    """What a source holds and what of it is asked.

    Attributes:
        rows: rows read, without empty lines.
        conversations: rows that are asked.
        replies: replies to generate.
        characters: of the contents of the prompts, each reply's prompt whole.
        dropped: {reason: rows}, and in `examples` {reason: place and words of the first}.
    """

    rows: int = 0
    conversations: int = 0
    replies: int = 0
    characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a manifest; each reason with its rows and an example."""
        dropped = {reason: {"rows": rows, "example": self.examples[reason]}
                   for reason, rows in self.dropped.most_common()}
        plain = ("rows", "conversations", "replies", "characters")
        return {name: getattr(self, name) for name in plain} | {"dropped": dropped}

    def line(self) -> str:
        """Return the counts in one line."""
        reasons = [f"{rows:,} {reason} (such as {self.examples[reason]})"
                   for reason, rows in self.dropped.most_common()]
        return (f"{self.rows:,} rows: {self.conversations:,} conversations with {self.replies:,} replies to ask; "
                f"dropped: {'; '.join(reasons) or 'none'}")

    def _drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, example)

    def _keep(self, replies: int, characters: int, sign: int = 1) -> None:
        self.conversations += sign
        self.replies += sign * replies
        self.characters += sign * characters


class PromptSource:
    """The conversations of a file, folder or dataset, chosen once and read as often as needed.

    Neither pass holds the rows: `scan` needs about 100 bytes a row for what it has seen (twice that where
    prompts are deduplicated), and one byte a row stays for which of them are kept.
    """

    def __init__(self, section: GenerateSection, limit: int | None = None, shape: Shape | None = None) -> None:
        """Find the source; `limit` takes only its first rows, `shape` makes of each what this reads.

        Raises:
            PreconditionError: there is no such file, folder or dataset.
            UsageError: --role-map names a role that does not exist.
        """
        self.name, self._section, self._limit = section.prompts, section, limit
        self._read = Reader(section.turns, section.role_map)
        rows = sources.open_rows(section.prompts, section.prompt_split)
        self._rows = (lambda: map(shape, rows())) if shape else rows
        self._kept = bytearray()
        self._counts: Counts | None = None

    def scan(self, check_stop: Callable[[], None] = lambda: None) -> Counts:
        """Read every row, find duplicates, choose the sample; return the counts.

        Raises:
            PreconditionError: a row is malformed (with its place and field), an id that was given occurs twice
                (with both places), or no row is left to ask.
        """
        counts, kept, self._counts = Counts(), bytearray(), None
        seen: tuple[set[int], set[int]] = (set(), set())
        sample: list[tuple[int, int, int, int]] = []  # (minus rank, number, replies, characters), worst first
        for number, (place, source, row) in enumerate(islice(self._rows(), self._limit)):
            if number % _CHECK_ROWS == 0:
                check_stop()
            counts.rows += 1
            kept.append(0)
            try:
                conversation = self._conversation(place, source, row)
                key = self._new_key(conversation, place, given_id(row) is not None, seen)
            except Dropped as dropped:
                counts._drop(dropped.reason, f"{place}: {dropped.words}")
                continue
            kept[number] = 1
            size = (len(conversation.asked), conversation.characters)
            counts._keep(*size)
            if self._section.sample is None:
                continue
            heapq.heappush(sample, (-hash64(f"{self._section.sample_seed}:{key}"), number, *size))
            if len(sample) > self._section.sample:
                _, out, replies, characters = heapq.heappop(sample)
                kept[out] = 0
                counts._keep(replies, characters, sign=-1)
                counts._drop("not in the sample", f"row {out + 1} of the source")
        if not counts.conversations:
            raise PreconditionError("no prompts", where=self.name, expected="at least one row that can be asked",
                                    found=counts.line())
        self._kept, self._counts = kept, counts
        return counts

    def __iter__(self) -> Iterator[Conversation]:
        """Yield the kept conversations in the order of the source.

        Raises PreconditionError when the source is not what it was when it was scanned.
        """
        left = (self._counts or self.scan()).conversations
        for kept, (place, source, row) in zip(self._kept, self._rows(), strict=False):
            if not kept:
                continue
            try:
                yield self._conversation(place, source, row)
            except Dropped:
                break
            left -= 1
            if not left:
                return
        raise PreconditionError("the prompts changed while they were read", where=self.name,
                                found=f"{left} conversations fewer than before", fix="run the same command again")

    @property
    def counts(self) -> Counts:
        """What `scan` has found."""
        return self._counts or self.scan()

    def _conversation(self, place: str, source: str, row: dict[str, Any]) -> Conversation:
        try:
            return self._read(row, source)
        except RecursionError:
            raise PreconditionError("a prompt row is malformed", where=place, found="objects nested too deeply",
                                    fix="correct or remove that row") from None
        except Malformed as error:
            where = f"{place}: {error.field}" if error.field else place
            raise PreconditionError("a prompt row is malformed", where=where, expected=error.expected,
                                    found=error.found, fix=error.fix) from None

    def _new_key(self, conversation: Conversation, place: str, given: bool, seen: tuple[set[int], set[int]]) -> int:
        """Return the hash by which a conversation is sampled, after noting what is seen of it.

        It is the hash of the id, or of the prompt where prompts are deduplicated: which one of two equal prompts
        is kept depends on their order, and the sample must not.
        Raises Dropped for a repetition, PreconditionError when an id that was given occurs twice.
        """
        ids, prompts = seen
        key = identity = hash64(conversation.id)
        if self._section.deduplicate == "prompts":
            key = hash64(sha256_json(conversation.question()))
            if key in prompts:
                raise Dropped("repeated prompt", f"id {conversation.id}")
            prompts.add(key)
        if identity in ids:
            if not given:
                raise Dropped("repeated row", f"id {conversation.id}")
            if first := self._first_place(conversation.id, place):  # else two ids share their 64 bits
                raise PreconditionError("a prompt row is malformed", where=f"{place}: id", expected="an id of its own",
                                        found=f"{conversation.id!r}, as in {first}", fix="correct or remove that row")
        ids.add(identity)
        return key

    def _first_place(self, identity: str, before: str) -> str | None:
        """Return the place of the first row with an id, None when none comes before that place."""
        for place, source, row in self._rows():
            if place == before:
                break
            try:
                if self._conversation(place, source, row).id == identity:
                    return place
            except Dropped:
                continue
        return None


# --- a list of prompts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One reply to be generated: the last one of a conversation, the first of a row of user turns.

    Attributes:
        id: id of the row, "#", and the turn: how many replies precede it.
        messages, tools, source: as in Conversation.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    source: str


def read_prompts(path: Path, limit: int | None = None, shape: Shape | None = None) -> list[Prompt]:
    """Return the prompts of the first `limit` rows of a source, in its order, all in memory.

    Of a row of user turns it is the first one: the others ask about replies that are yet to be generated.
    Raises PreconditionError as PromptSource does. Rows that are equal throughout and have no id are asked once.
    """
    source = PromptSource(GenerateSection(prompts=str(path)), limit, shape)
    counts = source.scan()
    if counts.dropped:
        logger.info("%s: %s", path, counts.line())
    found, later = [], 0
    for each in source:
        later += len(each.asked) - 1
        found.append(Prompt(each.prompt_id(0), each.messages[: each.asked[0]], each.tools, each.source))
    if later:
        logger.warning("%s: of conversations only the first user turn is measured; %d later turns are left out", path,
                       later)
    return found
