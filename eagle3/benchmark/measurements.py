"""Measurements of a benchmark on disk: kept, found again, and the acceptance that was predicted for them.

`runs/NAME.json` holds the figures of one measurement, `replies_NAME.jsonl` its replies. A measurement counts as done
when the first exists; it carries what decides it (`matrix.Cell`), the fingerprint of what concerns all of the stage,
and the checksum of its replies.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.benchmark import matrix
from eagle3.common import files
from eagle3.common.log import logger

_PREDICTED = "predicted_"


def store(directory: Path, figures: dict[str, Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a finished measurement and its replies; its own file, written last, makes it count as done.

    A file of that name stays where it is, whatever it holds: then the measurement gets a name that is not taken.
    """
    figures["name"] = _unused(directory, figures["name"])
    figures["measured_at"] = datetime.now(UTC).isoformat()
    path = directory / f"replies_{figures['name']}.jsonl"
    files.write_bytes(path, b"".join(files.encode_line(reply) for reply in replies))
    figures["replies"] = files.sha256_file(path)
    files.write_json(directory / "runs" / f"{figures['name']}.json", figures)
    return figures


def _unused(directory: Path, name: str) -> str:
    """Return the name, with a number where another measurement that is whole has it."""
    number, free = 1, name
    while (path := directory / "runs" / f"{free}.json").exists() and _intact(directory, files.read_json(path)):
        number += 1
        free = f"{name}-{number}"
    return free


def _intact(directory: Path, run: dict[str, Any]) -> bool:
    replies = directory / f"replies_{run['name']}.jsonl"
    return replies.exists() and files.sha256_file(replies) == run["replies"]


def kept(directory: Path, fingerprint: str) -> list[dict[str, Any]]:
    """Return what earlier runs of this stage measured, with replies intact, oldest first."""
    runs = []
    for path in _files(directory):
        run = files.read_json(path, fix="remove that file: it is measured again")
        if run["fingerprint"] != fingerprint or "server" not in run:
            logger.warning("%s is of another configuration: it is left alone", path)
        elif not _intact(directory, run):
            logger.warning("measuring %s again: its files are damaged", run["name"])
        else:
            runs.append(run)
    return sorted(runs, key=lambda run: run["measured_at"])


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted((directory / "runs").glob("*.json")) if not path.name.startswith(_PREDICTED)]


def adopted(directory: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint's basis of an earlier manifest without the axes, as it is now.

    Manifests once held the axes, and measurements no word of what they are: these get it here, so that they stay done.
    """
    old = manifest.get("fingerprint_basis", {})
    basis = {name: value for name, value in old.items() if name not in matrix.AXES and name != "input prompts"}
    if basis.keys() == old.keys():
        return basis
    fingerprint = files.sha256_json(basis)
    sets = {"prompts": Path(str(old.get("benchmark.prompts", ""))).name.partition(".")[0] or "prompts",
            "prompts_identity": old.get("input prompts", "")}
    for path in _files(directory):
        run = files.read_json(path)
        if "server" in run or run.get("fingerprint") != manifest.get("fingerprint"):
            continue
        role = matrix.DRAFTER if run["draft_tokens"] else matrix.BASELINE
        run |= sets | {"server": role, "temperature": float(old.get("benchmark.temperature", 0.0)), "repeat": 1,
                       "control_identity": "", "measured_at": "", "fingerprint": fingerprint}
        predicted = _prediction_path(directory, run)
        if predicted.exists():
            files.write_json(predicted, files.read_json(predicted) | {"fingerprint": fingerprint})
        files.write_json(path, run)
    return basis


def replies_of(directory: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replies of a measurement, in the order of the prompts."""
    return [reply for _, reply in files.read_jsonl(directory / f"replies_{run['name']}.jsonl")]


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


def measured_replies(directory: Path, run: dict[str, Any], baseline: str | None) -> Measured:
    """Return a run's replies as token ids, and where they part from those of its `baseline` (else of the named one)."""
    baseline = run.get("baseline") or baseline
    alone = replies_of(directory, {"name": baseline}) if baseline else ()
    own = {reply["id"]: reply["completion_token_ids"] for reply in alone}
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
    return directory / "runs" / f"{_PREDICTED}{run['name']}.json"
