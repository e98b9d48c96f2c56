"""Checks rows of stage 01 with the model's tokenizer and chat template, apart from the code that wrote them.

Imported by generate_against_vllm.py.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.traces import trace_rows

SKIPPED = ("truncated", "empty", "no reasoning", "unwanted reasoning", "template", "prompt too long")
Judge = tuple[Any, set[int], tuple[str, str]]  # tokenizer, ids that end a reply, think tags


def load_judge(model: Path, *, trust_remote_code: bool) -> Judge:
    """Return what rows are checked with, from the model's folder."""
    from transformers import AutoTokenizer

    from eagle3.traces.chat import load_chat

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    tags = load_chat(model, trust_remote_code=trust_remote_code).think_tags
    return tokenizer, end_tokens(model, tokenizer), tags


def verify(folder: Path, prompts: list[dict[str, str]], judge: Judge) -> dict[str, Any]:
    """Check every row of a finished 01_traces folder; return counts, and errors by kind with examples."""
    errors: list[tuple[str, str]] = []
    asked = {f"{prompt['id']}#0": prompt["prompt"] for prompt in prompts}
    places: Counter[str] = Counter()
    for row in trace_rows.read_traces(folder / trace_rows.FILE_NAME):
        places[row["id"]] += 1
        errors += [(kind, row["id"]) for kind in faults_of(row, asked.get(row["id"]), judge)]
    kept = len(places)
    lost = {name: {row["id"]: row for _, row in files.read_jsonl(folder / f"{name}.jsonl")}
            for name in ("skipped", "failures")}
    for records in lost.values():
        places.update(records.keys())
        errors += [("given up without a reason", name) for name, row in records.items() if not row.get("reason")]
    reasons = Counter(str(row.get("reason")) for row in lost["skipped"].values())
    errors += [("skipped for another reason than replies give", reason) for reason in reasons
               if reason not in SKIPPED and not reason.startswith("finish_reason ")]
    errors += [("neither kept, skipped nor failed", name) for name in asked.keys() - places.keys()]
    errors += [("nobody asked for it", name) for name in places.keys() - asked.keys()]
    errors += [("in more than one place", name) for name, times in places.items() if times > 1]
    return {"kept": kept, "skipped": len(lost["skipped"]), "failed": len(lost["failures"]), "reasons": dict(reasons),
            "errors": len(errors), "by_kind": dict(Counter(kind for kind, _ in errors)),
            "examples": [f"{kind}: {name}" for kind, name in errors[:8]]}


def end_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """Return the ids that end a reply, from generation_config.json and the tokenizer."""
    path = folder / "generation_config.json"
    ends = files.read_json(path).get("eos_token_id") if path.exists() else None
    found = {*ends} if isinstance(ends, list) else {ends}
    return {int(end) for end in found | {tokenizer.eos_token_id} if end is not None}


def faults_of(row: dict[str, Any], asked: str | None, judge: Judge) -> Iterator[str]:
    """Yield what is wrong with a row that answers the prompt `asked`."""
    from eagle3.traces.chat import as_ids

    tokenizer, ends, tags = judge
    messages, completion = row["prompt"]["messages"], row["completion_token_ids"]
    max_tokens = row["sampling"]["max_tokens"]
    if [message["content"] for message in messages] != [asked]:
        yield "another prompt than the file's"
    rendered = tokenizer.apply_chat_template(messages, tools=row["prompt"].get("tools") or None, tokenize=True,
                                             add_generation_prompt=True, **row["chat_template_kwargs"])
    if as_ids(rendered) != row["prompt_token_ids"]:
        yield "prompt ids are not the template's"
    if row["finish_reason"] == "length":
        if len(completion) != max_tokens:
            yield "cut, but not at max_tokens"
        text_ids = completion
    else:
        if completion[-1] not in ends:
            yield "no end token"
        text_ids = completion[:-1]
    if ends & set(text_ids):
        yield "an end token before the end"
    if len(completion) > max_tokens:
        yield "longer than max_tokens"
    decoded = tokenizer.decode(text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not spells(decoded, row, tags):
        yield "ids decode to another text"
    if row["usage"].get("completion_tokens", len(completion)) != len(completion):
        yield "the server counted other tokens"
    if row["token_source"] != "server":
        yield "ids are not the server's"
    ids, mask = trace_rows.sequence(row)
    if ids != row["prompt_token_ids"] + completion or len(mask) != len(ids):
        yield "the sequence is not prompt and completion"
    if [number for number, one in enumerate(mask) if one] != list(range(len(ids) - len(completion), len(ids))):
        yield "the mask is not exactly the completion"


def spells(decoded: str, row: dict[str, Any], tags: tuple[str, str]) -> bool:
    """Say whether a decoded completion is reasoning, then content, and besides only think tags and white space.

    Pieces of characters (U+FFFD) do not count: a server that decodes token by token may leave out what decoding
    the whole shows. What the server has parsed out as tool calls may stand there too.
    """
    decoded, rest, position = decoded.replace("\ufffd", ""), "", 0
    for text in (row["reasoning"], row["content"]):
        part = (text or "").replace("\ufffd", "")
        found = decoded.find(part, position)
        if found < 0:
            return False
        rest += decoded[position:found]
        position = found + len(part)
    rest += decoded[position:]
    for tag in tags:
        rest = rest.replace(tag, "")
    return bool(row["tool_calls"]) or not rest.strip()
