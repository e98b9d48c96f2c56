"""What a run left behind that bears on its acceptance: figures, manifests, exported files, the engine's log.

Nothing is computed with a model: JSON, headers, bytes and texts only.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.benchmark import measurements
from eagle3.benchmark.rounds import standard_error
from eagle3.checks import drafter_checks
from eagle3.checks.similarity import Pair, sampled
from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import Finding
from eagle3.drafter import config_keys, verifier
from eagle3.drafter.checkpoint import Export, canonical_key, training_record
from eagle3.drafter.flat_config import flat_config
from eagle3.engines.startup_log import EngineLog

Manifest = dict[str, Any]
NOT_TRAINED = "not in the checkpoint"

@dataclass(frozen=True)
class Figures:
    """An acceptance length and its parts: shares of all rounds by position, cumulative (empty if not told), rounds."""

    length: float
    by_position: list[float]
    rounds: float

    @property
    def error(self) -> float:
        """Standard error of the length if rounds were independent."""
        if self.by_position:
            return standard_error(self.by_position, self.rounds)
        mean = self.length - 1.0
        square = mean * (1 + 2 * mean)  # as if every position were as hard
        return (max(0.0, square - mean * mean) / max(self.rounds, 1.0)) ** 0.5

    def over(self, positions: int) -> "Figures":
        """Return the figures of the first positions only; as they are where shares are not told."""
        shares = (self.by_position + [0.0] * positions)[:positions]
        return Figures(1.0 + sum(shares), shares, self.rounds) if self.by_position else self


@dataclass
class Run:
    """A measured run and everything upstream of it.

    Attributes:
        bench: folder of stage 06. manifest: its manifest. made: manifests upstream by stage name, {} if missing.
        measured: measurements with a drafter, in the order they were made; main: the one to be explained.
        served: the drafter's folder as it lies there now, with what is known of its training.
        reference: the checkpoint that stage 05 made it from, None when that cannot be found.
        changed: what differs between now and the measurement, in words.
        predicted_low: whether a figure below training's is to be explained by files or data.
    """

    run_dir: Path
    bench: Path
    manifest: Manifest
    made: dict[str, Manifest]
    measured: list[dict[str, Any]]
    main: dict[str, Any] | None
    promised: Figures | None
    served: Export
    reference: Export | None
    log: EngineLog
    traces_path: Path
    changed: list[str]
    predicted_low: bool = False

    def option(self, section: str, name: str) -> Any:
        """Return an option of the measurement, None when it was not recorded."""
        return ((self.manifest.get("options") or {}).get(section) or {}).get(name)

    @property
    def attached(self) -> bool:
        """Whether somebody else started the server, with a command line that is not known."""
        return bool(self.main["engine"]["attached"] if self.main else self.option("benchmark", "drafter_endpoint"))

    @property
    def arguments(self) -> list[str]:
        """The engine's arguments of the measurement."""
        return [*(self.option("engine", "args") or []), *(self.option("benchmark", "serve_args") or [])]

    def figures(self, name: str) -> Figures | None:
        """Return the figures of "acceptance" (measured) or "predicted", if there are any."""
        found = (self.main or {}).get(name)
        return Figures(found["length"], found["by_position"], found.get("drafts") or found["rounds"]) if found else None

    @functools.cached_property
    def findings(self) -> dict[str, Finding]:
        """What every static check says about the served folder, by name."""
        return {each.name: each for each in drafter_checks.findings(self.served)}

    @functools.cached_property
    def config_changes(self) -> dict[str, tuple[Any, Any]]:
        """{key: (served, what stage 05 makes of the checkpoint)} of every value that differs."""
        if self.reference is None:
            return {}
        wanted = flat_config(self.reference.config(), self.reference.canonical)
        return {name: (value, wanted.get(name)) for name, value in self.served.flat.items()
                if value != wanted.get(name) and name != "dtype"}

    @functools.cached_property
    def weight_changes(self) -> dict[str, str]:
        """{canonical name: how} of every tensor that is not the checkpoint's, bit by bit."""
        if self.reference is None:
            return {}
        wanted = {canonical_key(name): entry for name, entry in self.reference.shipped.items()}
        found = self.served.canonical
        changes = dict.fromkeys(wanted.keys() - found.keys(), "missing")
        changes |= dict.fromkeys(found.keys() - wanted.keys(), NOT_TRAINED)
        return changes | {name: how for name in wanted.keys() & found.keys()
                          if (how := _difference(found[name], wanted[name]))}

    @functools.cached_property
    def replies(self) -> list[Pair]:
        """The measured replies that came with token ids."""
        rows = measurements.replies_of(self.bench, self.main) if self.main else []
        return [(row["prompt_token_ids"], row["completion_token_ids"]) for row in rows
                if row["prompt_token_ids"] and row["completion_token_ids"]]

    @functools.cached_property
    def traces(self) -> list[Pair]:
        """The traces, or an even sample of very many."""
        return [(row["prompt_token_ids"], row["completion_token_ids"]) for row in sampled(self.traces_path)]

    @property
    def model_changes(self) -> dict[str, str]:
        """{file: how} by which the verifier that was measured differs from the one that made the training data."""
        served = (self.manifest.get("inputs") or {}).get("model")
        for stage in ("01_traces", "02_states"):
            theirs = (self.made[stage].get("inputs") or {}).get("model")
            if isinstance(theirs, dict) and isinstance(served, dict):
                names = sorted(name for name in theirs.keys() | served.keys() if theirs.get(name) != served.get(name))
                return {name: "another" if name in theirs and name in served else
                        "gone" if name in theirs else "new" for name in names}
        return {"": "no record"}


def gather(path: Path, *, model: str = "", drafter: str | None = None) -> Run:
    """Return what a run, or one folder of stage 06 in it, left behind.

    Args:
        model, drafter: folders that take the place of the recorded ones.
    Raises:
        PreconditionError: nothing was measured, or the verifier or the drafter is not there any more.
    """
    bench = path if _is_bench(path) else path / "06_bench"
    if not _is_bench(bench):
        raise PreconditionError("nothing was measured here", where=path, expected="06_bench, with its manifest.json",
                                fix="run 06_benchmark.py first; `--drafter DIR` without --explain checks a drafter")
    manifest = _manifest(bench)
    options = manifest.get("options") or {}
    run_dir = _place((options.get("common") or {}).get("run_dir"), bench.parent) if path == bench else path
    kind = (options.get("engine") or {}).get("kind") or "vllm"
    folder = Path(drafter) if drafter else _place((options.get("benchmark") or {}).get("drafter"),
                                                   run_dir / "05_export" / kind)
    facts = verifier.read(Path(model or (options.get("model") or {}).get("path") or "."))
    exported = _manifest(folder.parent, "05_export")
    checkpoint = _checkpoint(exported, run_dir)
    made = _upstream(run_dir, checkpoint) | {"05_export": exported}
    measured, predicted = _measurements(bench), manifest.get("inputs") or {}
    main = _main(measured, made["04_train"])
    version = main["engine"]["version"] if main else predicted.get("engine")
    ids, here = training_record(checkpoint) if checkpoint else (None, False)
    ids = ids or (exported.get("trained") or {}).get("ids") or ((made["02_states"].get("layers") or [])[:-1] or None)
    basis = exported.get("fingerprint_basis") or {}
    length = basis.get("export.serving_length") or facts.max_positions
    trained_embedding = bool(basis.get("export.trained_embedding"))
    known = {"verifier": facts, "engine": kind, "trained_ids": ids, "serving_length": length,
             "version": version if version != "attached" else None, "trained_here": here,
             "keeps_embedding": trained_embedding}  # fmt: skip
    served = _export(folder, known)
    counts = (options.get("benchmark") or {}).get("draft_tokens") or [0]
    name = f"{bench.name}-drafter-{main['draft_tokens'] if main else counts[0]}-server.log"
    return Run(run_dir=run_dir, bench=bench, manifest=manifest, made=made, measured=measured, main=main,
               promised=_promise(checkpoint, made["04_train"]), served=served,
               reference=_export(checkpoint, known) if checkpoint else None, log=EngineLog(run_dir / "logs" / name),
               traces_path=_place(((made["02_states"].get("options") or {}).get("extract") or {}).get("traces"),
                                  run_dir / "01_traces") / "traces.jsonl",
               changed=_changed(folder, predicted.get("drafter"), exported))


# --- folders ----------------------------------------------------------------------------------------------


def _is_bench(path: Path) -> bool:
    return (path / "results.json").is_file() or _manifest(path).get("stage") == "06_bench"


def _manifest(folder: Path, stage: str = "") -> Manifest:
    path = folder / "manifest.json"
    content = files.read_json(path) if path.is_file() else {}
    return content if not stage or content.get("stage") == stage else {}


def _place(recorded: str | None, default: Path) -> Path:
    """Return a recorded path if it still leads somewhere (runs are moved), else the usual place."""
    return Path(recorded) if recorded and Path(recorded).exists() else default


def _export(folder: Path, known: dict[str, Any]) -> Export:
    raw = config_keys.read(folder, "name the served drafter with --drafter")
    return Export(folder=folder, raw=raw, tensors=tensor_files.read(folder), **known)


def _checkpoint(exported: Manifest, run_dir: Path) -> Path | None:
    """Return the checkpoint that stage 05 exported: `best` may have moved on since."""
    recorded = ((exported.get("options") or {}).get("export") or {}).get("checkpoint")
    best = _place(recorded, run_dir / "04_train" / "checkpoints" / "best")
    digests = {name: value for name, value in (exported.get("inputs") or {}).items() if name.endswith(".safetensors")}
    best = files.followed(best)
    # Every folder beside it: a copy made by hand is as good, its weights are compared.
    candidates = [best, *sorted(best.parent.glob("step_*"))] if best.parent.is_dir() else []
    return next((folder for folder in candidates if digests and (folder / "config.json").is_file() and all(
        (folder / name).is_file() and files.sampled_digest(folder / name) == value
        for name, value in digests.items())), None)


def _upstream(run_dir: Path, checkpoint: Path | None) -> dict[str, Manifest]:
    """Return the manifests of stages 01 to 04, following the folders that each says it read."""
    trained = checkpoint.resolve().parent.parent if checkpoint else run_dir / "04_train"
    train = _manifest(trained, "04_train")
    section = (train.get("options") or {}).get("train") or {}
    states = _manifest(_place(section.get("states"), run_dir / "02_states"), "02_states")
    traces = ((states.get("options") or {}).get("extract") or {}).get("traces")
    return {
        "01_traces": _manifest(_place(traces, run_dir / "01_traces"), "01_traces"),
        "02_states": states,
        "03_vocab": _manifest(_place(section.get("vocab"), run_dir / "03_vocab"), "03_vocab"),
        "04_train": train,
    }


def _changed(folder: Path, measured: Any, exported: Manifest) -> list[str]:
    """Say which files of the drafter are not those that were measured, or not those that stage 05 wrote."""
    notes = []
    if isinstance(measured, dict):
        now = files.model_identity(folder)
        names = sorted(name for name in now.keys() | measured.keys() if now.get(name) != measured.get(name))
        notes += [f"{folder / name} has changed since the measurement: this is about what lies there now"
                  for name in names]
    written = (exported.get("outputs") or {}).get("config.json") or {}
    if written.get("path") == f"{folder.name}/config.json" \
            and files.sha256_file(folder / "config.json") != written["sha256"]:
        notes.append(f"{folder / 'config.json'} is not what stage 05 wrote")
    return notes


# --- figures and data -------------------------------------------------------------------------------------


def _measurements(bench: Path) -> list[dict[str, Any]]:
    """Return the measurements with a drafter; of a stage that did not finish, those that it finished."""
    if (bench / "results.json").is_file():
        runs = files.read_json(bench / "results.json")["runs"]
    else:
        paths = sorted((bench / "runs").glob("drafter-*.json"), key=lambda path: path.stat().st_mtime)
        runs = [files.read_json(path) for path in paths]
        for run in runs:
            walked = bench / "runs" / f"predicted_{run['name']}.json"
            if walked.is_file() and files.read_json(walked).get("replies") == run["replies"]:
                run["predicted"] = files.read_json(walked)
    return [run for run in runs if run["draft_tokens"] and run.get("acceptance")]


def _main(measured: list[dict[str, Any]], train: Manifest) -> dict[str, Any] | None:
    """Return the measurement closest to what training promised: its draft-token count, predicted if any is."""
    wanted = ((train.get("options") or {}).get("train") or {}).get("draft_tokens") or 3
    return min(measured, key=lambda run: (abs(run["draft_tokens"] - wanted), not run.get("predicted")), default=None)


def _promise(checkpoint: Path | None, train: Manifest) -> Figures | None:
    """Return the acceptance that stage 04 walked on its validation samples with the exported checkpoint."""
    counters = checkpoint / "trainer.json" if checkpoint else None
    validation = (files.read_json(counters).get("validation") if counters and counters.is_file() else None) \
        or train.get("best") or {}
    acceptance = validation.get("acceptance")
    return Figures(acceptance["length"], acceptance["by_position"], acceptance["rounds"]) if acceptance else None


def _difference(found: tensor_files.Entry, wanted: tensor_files.Entry) -> str:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{found.dtype} {found.shape} instead of {wanted.dtype} {wanted.shape}"
    pairs = zip(tensor_files.blocks(found), tensor_files.blocks(wanted), strict=True)
    return "" if all(a == b for a, b in pairs) else "other values"
