"""Prompt sets by name: published benchmarks, read from local files in the format in which they are published.

Every question is asked as it stands, without a system prompt or an instruction added, and of several turns the first:
the others ask about replies that are yet to be generated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.traces import prompts
from eagle3.traces.prompts import Prompt
from eagle3.traces.sources import Placed

# What SPEED-Bench's rows on the hub hold in place of text that its prepare.py takes from elsewhere.
_UNPREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Format:
    """How a benchmark is published: what it is, fields that each row has, and what this project reads of a row."""

    about: str
    fields: tuple[str, ...]
    read: Callable[[dict[str, Any]], dict[str, Any]]


def _speed_bench(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the hub (`turns`) or as prepared for engines (`messages`, all of them the user's)."""
    messages = row.get("messages") or []
    turns = row.get("turns") or [message.get("content") for message in messages if isinstance(message, dict)]
    return {"id": row["question_id"], "turns": turns}


FORMATS = {
    "mt-bench": Format("MT-Bench's question.jsonl: 80 questions of 8 kinds", ("question_id", "turns"),
                       lambda row: {"id": row["question_id"], "turns": row["turns"]}),
    "gsm8k": Format("GSM8K's test.jsonl: 1,319 word problems", ("question", "answer"),
                    lambda row: {"prompt": row["question"]}),
    "humaneval": Format("HumanEval.jsonl(.gz): 164 Python functions to complete", ("task_id", "prompt", "entry_point"),
                        lambda row: {"id": row["task_id"], "prompt": row["prompt"]}),
    "math-500": Format("MATH-500's test.jsonl: 500 competition problems", ("problem", "unique_id"),
                       lambda row: {"id": row["unique_id"], "prompt": row["problem"]}),
    "speed-bench": Format("SPEED-Bench, a split as its prepare.py writes it (such as qualitative.jsonl: 880 prompts of "
                          "11 kinds)", ("question_id", "category"), _speed_bench),
}


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured together.

    Attributes:
        name: in tables and file names; "" is never one. identity: hash of what is asked. about: what it is.
    """

    name: str
    path: Path
    prompts: list[Prompt]
    identity: str
    about: str

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        return {"name": self.name, "path": str(self.path), "about": self.about, "prompts": len(self.prompts),
                "identity": self.identity}


def named(prompts_file: str, sets: list[str]) -> dict[str, Path]:
    """Return {name: file} of --prompts (named after its file) and --prompt-sets; UsageError where they are none."""
    found = {Path(prompts_file).name.partition(".")[0] or "prompts": Path(prompts_file)} if prompts_file else {}
    for word in sets:
        name, equals, path = word.partition("=")
        if not equals or not path or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise UsageError("not a prompt set", where="--prompt-sets", found=word,
                             expected="NAME=FILE, a name of letters, digits, - and _",
                             fix=f"such as gsm8k=data/test.jsonl; known: {', '.join(FORMATS)}")
        if name in found:
            raise UsageError("two prompt sets have one name", where="--prompt-sets", found=name,
                             fix="give each a name of its own")
        found[name] = Path(path)
    if not found:
        raise UsageError("no prompts", where="--prompts", fix="name a file of held-out prompts with --prompts, or more "
                         "of them with --prompt-sets")
    return found


def read(name: str, path: Path, limit: int | None = None) -> PromptSet:
    """Return a prompt set; PreconditionError where the file is missing or not what its name says."""
    form = FORMATS.get(name)
    asked = prompts.read_prompts(path, limit, _shape(name, form) if form else None)
    identity = files.sha256_json([[prompt.id, prompt.messages, prompt.tools] for prompt in asked])
    return PromptSet(name, path, asked, identity, form.about if form else "prompts of yours")


def user_texts(sets: list[str]) -> list[str]:
    """Return what users say in the prompts of NAME=FILE sets, set by set."""
    files_of = named("", sets) if sets else {}
    return [message["content"] for name, path in files_of.items() for prompt in read(name, path).prompts
            for message in prompt.messages if message["role"] == "user" and message["content"]]


def _shape(name: str, form: Format) -> prompts.Shape:
    """Return the function that makes a row of a published format one that `prompts` reads."""
    def shape(placed: Placed) -> Placed:
        place, source, row = placed
        missing = [field for field in form.fields if row.get(field) is None]
        if missing:
            raise PreconditionError(
                "a row is not of this prompt set", where=place, found=f"no {', '.join(missing)}",
                expected=f"{name}: {form.about}, with {', '.join(form.fields)}",
                fix="correct the file, or give the set another name: then rows of messages, turns or prompt are read")
        shaped = form.read(row)
        if any(_UNPREPARED in str(turn) for turn in shaped.get("turns", ())):
            raise PreconditionError("SPEED-Bench is not prepared: this row holds a placeholder", where=place,
                                    fix="make the file with SPEED-Bench's own prepare.py, which fetches the texts")
        return place, source, shaped

    return shape
