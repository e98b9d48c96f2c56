"""Measurements of a benchmark on disk, and what comes of comparing them.

`runs/NAME.json` holds the figures of one server at one concurrency, `replies_NAME.jsonl` the replies. A
measurement counts as done when the first exists; it carries the fingerprint of its configuration and the
checksum of its replies.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.log import logger

BASELINE = 0  # the "draft-token count" of the verifier alone


def store(directory: Path, figures: dict[str, Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a finished measurement and its replies; its own file, written last, makes it count as done."""
    path = directory / f"replies_{figures['name']}.jsonl"
    files.write_bytes(path, b"".join(files.encode_line(reply) for reply in replies))
    figures["replies"] = files.sha256_file(path)
    files.write_json(directory / "runs" / f"{figures['name']}.json", figures)
    return figures


def finished(directory: Path, name: str, fingerprint: str) -> dict[str, Any] | None:
    """Return a measurement that an earlier run of this very configuration finished, with its replies intact."""
    path, replies = directory / "runs" / f"{name}.json", directory / f"replies_{name}.jsonl"
    if not path.exists():
        return None
    run = files.read_json(path, fix="remove that file: it is measured again")
    intact = replies.exists() and files.sha256_file(replies) == run["replies"]
    if not intact or run["fingerprint"] != fingerprint:
        logger.warning("measuring %s again: its files are damaged or of another configuration", name)
        return None
    logger.info("%s is measured already", name)
    return run


def replies_of(directory: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replies of a measurement, in the order of the prompts."""
    return [reply for _, reply in files.read_jsonl(directory / f"replies_{run['name']}.jsonl")]


def compare(directory: Path, runs: list[dict[str, Any]], *, greedy: bool) -> None:
    """Set `speedup` and, for greedy replies, `lossless` of each run with a drafter.

    Servers that were asked with other sampling, or fall back on another, do other work: no speed-up is told then.
    Batches of another shape round differently in bfloat16, so a few greedy replies part ways after some
    tokens without anything being wrong; where they do is reported.
    """
    baseline = {run["concurrency"]: run for run in runs if run["draft_tokens"] == BASELINE}
    for run in runs:
        if run["draft_tokens"] == BASELINE:
            continue
        reference = baseline[run["concurrency"]]
        if run.get("sampling") == reference.get("sampling"):
            run["speedup"] = run["tokens_per_s"] / reference["tokens_per_s"]
        else:
            run.pop("speedup", None)
            logger.warning("no speed-up is told of %s: it sampled with %s, %s with %s", run["name"],
                           run.get("sampling"), reference["name"], reference.get("sampling"))
        if greedy:
            run["lossless"] = agreement(replies_of(directory, reference), replies_of(directory, run))


def agreement(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many replies are identical and, for the others, the index of the first different token.

    Replies without token ids are compared by character.
    """
    parted = {}
    for one, other in zip(expected, found, strict=True):
        name = "completion_token_ids" if one["completion_token_ids"] and other["completion_token_ids"] else "text"
        a, b = one[name], other[name]
        if a != b:
            shared = min(len(a), len(b))
            parted[one["id"]] = next((i for i in range(shared) if a[i] != b[i]), shared)
    return {"replies": len(expected), "identical": len(expected) - len(parted), "first_difference": parted}


# --- what the replies should have given -------------------------------------------------------------------


@dataclass
class Measured:
    """Replies of one measurement.

    Attributes:
        draft_tokens: tokens drafted a round.
        ids: names of the replies. replies: (prompt ids, completion ids) of each.
        parted: {number of the reply: (index of its first token that differs from the verifier's own reply, the token
            that stands there in the verifier's)}.
        sampling: settings with which they were asked for; {} where that was not recorded.
    """

    draft_tokens: int
    ids: list[str]
    replies: list[tuple[list[int], list[int]]]
    parted: dict[int, tuple[int, int]] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


def measured_replies(directory: Path, run: dict[str, Any], baseline: str) -> Measured:
    """Return a run's replies as token ids, and where they part from those of the run named `baseline`."""
    own = {reply["id"]: reply["completion_token_ids"] for reply in replies_of(directory, {"name": baseline})}
    parting = (run.get("lossless") or {}).get("first_difference", {})
    sampling = (run.get("sampling") or {}).get("sent") or {}
    measured = Measured(run["draft_tokens"], [], [], sampling=sampling)
    for reply in replies_of(directory, run):
        name, prompt, completion = reply["id"], reply["prompt_token_ids"], reply["completion_token_ids"]
        if not prompt or len(completion) < 2:
            continue
        index = parting.get(name)
        if index is not None and index < min(len(own[name]), len(completion)):
            measured.parted[len(measured.ids)] = (index, own[name][index])
        measured.ids.append(name)
        measured.replies.append((prompt, completion))
    return measured


def store_prediction(
    directory: Path, run: dict[str, Any], predicted: dict[str, Any], margins: dict[str, dict[str, Any]]
) -> None:
    """Keep the predicted acceptance of a run's very replies, and the margins at which replies part, by id."""
    basis = {"fingerprint": run["fingerprint"], "replies": run["replies"]}
    files.write_json(_prediction_path(directory, run), basis | predicted | {"margins": margins})


def prediction(directory: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """Return the prediction that was kept for these very replies, if there is one."""
    path = _prediction_path(directory, run)
    kept = files.read_json(path) if path.exists() else {}
    belongs = all(kept.get(name) == run[name] for name in ("fingerprint", "replies"))
    return kept if belongs else None


def use_prediction(directory: Path, run: dict[str, Any]) -> bool:
    """Set `predicted`, `difference` and `lossless.margins` of a run from what was kept; False when nothing was."""
    kept = prediction(directory, run)
    if kept is None:
        return False
    apart = ("fingerprint", "replies", "margins")
    run["predicted"] = {name: value for name, value in kept.items() if name not in apart}
    if run["acceptance"]:
        run["difference"] = run["predicted"]["length"] - run["acceptance"]["length"]
    if kept["margins"]:
        run["lossless"]["margins"] = kept["margins"]
    return True


def _prediction_path(directory: Path, run: dict[str, Any]) -> Path:
    return directory / "runs" / f"predicted_{run['name']}.json"
