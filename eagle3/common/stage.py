"""A stage on its directory: lock, manifest, fingerprint, upstream results, last line.

In a script's `run(options, stage)`, `stage.open(...)` is the border: before it only checks and estimates, after
it the directory is locked and writing starts.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.common import config, files, log, probe, proofs, provenance, workers
from eagle3.common import manifest as manifests
from eagle3.common.errors import Interrupted, PreconditionError, StageError, StaleError
from eagle3.common.interrupt import Interrupt
from eagle3.common.lock import DirectoryLock
from eagle3.common.log import logger
from eagle3.common.options import CommonOptions

SCHEMA_VERSION = 1
# script stem → (stage directory, next script)
STAGES = {
    "01_generate_synthetic": ("01_traces", "02_extract_hidden_states.py"),
    "02_extract_hidden_states": ("02_states", "03_build_vocab_mapping.py"),
    "03_build_vocab_mapping": ("03_vocab", "04_train.py"),
    "04_train": ("04_train", "05_fix_weight_keys.py"),
    "05_fix_weight_keys": ("05_export", "06_benchmark.py"),
    "06_benchmark": ("06_bench", ""),
}


class Stage:
    """One stage on one output directory.

    Attributes:
        name: directory name of the stage, such as "02_states".
        directory: where this stage writes (`--out`, else run_dir/name).
        run_dir: the run directory (the parent of --out when only that is given).
        manifest: what manifest.json holds; stages add to `counts` and `outputs`.
    """

    def __init__(self, script: str, options: Any, argv: list[str]) -> None:
        self.script, self.options, self.argv = script, options, config.without_secrets(argv)
        self.common: CommonOptions = options.common
        self.name, self._next = STAGES[script]
        self.run_dir = Path(self.common.run_dir or Path(self.common.out or ".").parent)
        self.directory = Path(self.common.out) if self.common.out else self.run_dir / self.name
        self.manifest: dict[str, Any] = {}
        self._begun = False
        self._lock: DirectoryLock | None = None
        log_file = None if self.common.dry_run else self.run_dir / "logs" / f"{self.directory.name}.log"
        log.set_up(log_file, self.common.log_level)
        logger.debug("command: %s", shlex.join(self.argv))
        self.interrupt = Interrupt(led=workers.takes_part(script))

    # --- inputs and outputs ---

    def path_of(self, given: str | None, default: str) -> Path:
        """Return a named input's path: the option's value, else `default` inside the run directory."""
        return Path(given) if given else self.run_dir / default

    def upstream(
        self, directory: Path, option: str, planned: Callable[[], dict[str, Any] | None] | None = None
    ) -> dict[str, Any]:
        """Return the manifest of a finished upstream stage.

        Args:
            planned: for a dry run before that stage has run at all: what of its manifest can be foreseen.
        Raises PreconditionError when there is none, the stage has not completed, or a file is not what it wrote.
        """
        if self.common.dry_run and planned and not directory.exists() and (foreseen := planned()):
            return foreseen
        producer = next((f"{s}.py" for s, (name, _) in STAGES.items() if directory.name.startswith(name)), "")
        fix = f"run {producer or 'the stage that makes it'} first, or name another with {option}"
        if not (directory / "manifest.json").is_file():
            raise PreconditionError("an input is missing", where=directory / "manifest.json",
                                    expected="a finished stage", fix=fix)
        manifest = manifests.read(directory, fix)
        if manifest.get("status") != "complete":
            raise PreconditionError(
                "an input is not complete",
                where=directory,
                expected="status complete",
                found=f"status {manifest.get('status')}",
                fix=f"run {producer or 'that stage'} again until it completes",
            )
        if not workers.FOLDER:  # the parent has proved it
            anew = f"python {shlex.join(manifest['argv'])}" if manifest.get("argv") else producer or "that stage"
            proofs.require(manifests.outputs_of(manifest, directory), cache=self.proof_cache,
                           fix=f"restore it from a copy, or run the stage again, which makes it anew: {anew}")
        return manifest

    @property
    def proof_cache(self) -> Path | None:
        """Where the run remembers which files it has proved; a dry run writes nothing."""
        return None if self.common.dry_run else self.run_dir / proofs.CACHE

    def open(
        self,
        *,
        inputs: dict[str, Any],
        results: dict[str, Any] | None = None,
        stale_on: tuple[str, ...] = (),
        grows: bool = False,
        holds: Callable[[], bool] | None = None,
        upgraded: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> bool:
        """Lock the directory, compare fingerprints and start (or resume) the manifest.

        Args:
            inputs: identity of each input by name; all of them make the fingerprint unless `grows`.
            results: options that change results; default: every such option of this stage.
            stale_on: names in `inputs` that must be equal although the stage grows.
            grows: appended inputs extend this stage; it checks its own samples.
            holds: says whether any result lies there; to an empty directory no option is stale, so a run that
                failed before its first unit does not stand in the way of the corrected command.
            upgraded: returns the fingerprint's basis of an earlier manifest as this version writes it; what lies there
                may be brought up to date with it.
        Returns:
            True when there is work to do; False when this very result is complete already. A complete result that may
            grow keeps its manifest until `begin`.
        Raises:
            StaleError: other options or inputs made what lies there. PreconditionError: locked.
        """
        options = config.result_options(self.options) if results is None else results
        basis = dict(options)
        for name, identity in inputs.items():
            if not grows or name in stale_on:
                basis[f"input {name}"] = identity if isinstance(identity, str) else files.sha256_json(identity)
        self._acquire()
        previous = self._before = self._previous()
        if previous and (holds is None or holds()):
            self._refuse_if_stale(upgraded(previous) if upgraded else previous.get("fingerprint_basis", {}), basis)
        if previous and previous["status"] == "complete" and not grows and self._outputs_intact(previous):
            self.manifest = previous
            logger.info("%s is complete already: %s", self.name, self.directory)
            return False
        self.manifest = {
            "schema_version": SCHEMA_VERSION,
            "stage": self.name,
            "status": "running",
            "started_at": _now(),
            "ended_at": None,
            "argv": self.argv,
            "pid": os.getpid(),
            "options": config.to_dict(self.options),
            "fingerprint": files.sha256_json(basis),
            "fingerprint_basis": basis,
            "inputs": inputs,
            "counts": {},
            "outputs": {},
            "patches": [],
            "git_commit": provenance.git_commit(),
            "versions": provenance.versions(),
            "gpus": provenance.gpu_names(),
            "seconds": {"before": _seconds_spent(previous)},
        }
        self._started = time.monotonic()
        self._begun = not (grows and previous and previous["status"] == "complete")
        if self._begun:
            self._save()
        return True

    def made_with(self) -> dict[str, Any]:
        """Return what a result says of its making: command, resolved configuration, versions, hardware."""
        told = {name: self.manifest[name] for name in ("options", "versions", "gpus", "git_commit")}
        return {"command": "python " + shlex.join(self.manifest["argv"])} | told | {"processor": provenance.processor()}

    def begin(self) -> None:
        """Say that new work is about to be added: from now on what lies there is no longer the complete result."""
        if not self._begun:
            self._begun = True
            self._save()

    def join(self) -> None:
        """Take part, as the first worker, in the run that the parent has opened: it is to call `complete` only."""
        self.manifest, self._started = manifests.read(self.directory), time.monotonic()
        self._begun = True

    def run_workers(self, count: int) -> None:
        """Run this command in `count` processes on what `open` has opened; the first of them completes it.

        Raises what `workers.run` does.
        """
        assert self._lock is not None  # the workers keep it until they are gone
        logger.info("starting %d processes", count)
        try:
            workers.run([sys.executable, *sys.argv], count, self.interrupt, [self._lock.fileno()])
        finally:  # complete, perhaps, even if one failed after that
            self.manifest = manifests.read(self.directory)

    def finished(self, content: str, missing: int = 0) -> bool:
        """Say whether a stage that grows has nothing to do, and if so put its complete manifest back.

        Args:
            content: hash of what the stage would hold when done; `complete(content=…)` recorded the last one.
            missing: units that are not done.
        """
        previous = self._before
        if missing or not previous or previous["status"] != "complete" or previous.get("content") != content:
            return False
        if not self._outputs_intact(previous):
            return False
        self.manifest = previous
        logger.info("%s is complete already: %s", self.name, self.directory)
        return True

    def complete(self, *, counts: dict[str, Any], outputs: dict[str, Path], **more: Any) -> None:
        """Record outputs with size and SHA-256 and set the status to complete."""
        self.manifest["counts"] = counts
        self.manifest["outputs"] = {
            name: {
                "path": str(path.relative_to(self.directory)) if path.is_relative_to(self.directory) else str(path),
                "bytes": path.stat().st_size,
                "sha256": files.sha256_file(path),
            }
            for name, path in outputs.items()
        }
        self.manifest.update(more)
        hashes = {name: entry["sha256"] for name, entry in self.manifest["outputs"].items()}
        self.manifest["identity"] = files.sha256_json([self.manifest["fingerprint"], hashes])
        self._end("complete")

    def end(self, status: str, *, error: str = "") -> None:
        """Write the last state of this run into the manifest (nothing when `open` was not reached)."""
        if not self.manifest or self._lock is None or self.manifest.get("status") == "complete":
            return
        if not self._begun:
            logger.info("nothing was begun: the result in %s stays complete", self.directory)
            return
        self._end(status, error)

    def _end(self, status: str, error: str = "") -> None:
        spent = time.monotonic() - self._started
        self.manifest.update(status=status, ended_at=_now(), error=error)
        self.manifest["seconds"]["this_run"] = round(spent, 1)
        with contextlib.suppress(OSError, StageError):
            self._save()

    @property
    def is_complete(self) -> bool:
        """Whether a complete result lies there, which `open` may yet find stale or damaged."""
        path = self.directory / "manifest.json"
        return path.exists() and not self.common.restart and manifests.read(self.directory).get("status") == "complete"

    @property
    def signal(self) -> int | None:
        """The signal that has asked to stop, if one has."""
        return self.interrupt.signal

    def check_stop(self) -> None:
        """Raise Interrupted if a signal has asked to stop; call it between units of work."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def progress(self, label: str, total: int, unit: str, already_done: int = 0) -> log.Progress:
        """Return a progress display whose figures `eagle3.status` can read."""
        return log.Progress(label, total, unit, already_done, self._save_progress)

    # --- manifest and lock ---

    def _acquire(self) -> None:
        """Lock the directory; with --restart move what lies there aside first."""
        self._lock = DirectoryLock(self.directory)
        probe.say(self.directory)
        if not self.common.restart or not (self.directory / "manifest.json").exists():
            return
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.old-{number}")).exists():
            number += 1
        os.rename(self.directory, aside)
        logger.info("moved the old result to %s", aside)
        self._lock.release(moved=aside)
        self._lock = DirectoryLock(self.directory)

    def release(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _previous(self) -> dict[str, Any] | None:
        if not (self.directory / "manifest.json").exists():
            return None
        return manifests.read(self.directory, "move the directory away or use --restart")

    def _refuse_if_stale(self, old: dict[str, Any], basis: dict[str, Any]) -> None:
        basis = json.loads(json.dumps(basis, default=str))
        changed = [name for name in sorted({*old, *basis}) if old.get(name) != basis.get(name)]
        if not changed:
            return
        command = "python " + shlex.join(self.argv)
        raise StaleError(
            "what lies there was made with other options or inputs",
            where=self.directory,
            found="\n".join(f"{n}: {_short(old.get(n))} → {_short(basis.get(n))}" for n in changed),
            fix=f"keep both:  {command} --out {shlex.quote(str(self.directory))}_2\nor replace: {command} --restart"
            "   (moves the old aside)",
        )

    def _outputs_intact(self, manifest: dict[str, Any]) -> bool:
        """Say whether every recorded output is what was written; what is damaged is made again."""
        damaged = proofs.look(manifests.outputs_of(manifest, self.directory), cache=self.proof_cache)
        for path, (expected, found) in damaged.items():
            logger.warning("%s is missing or damaged (%s instead of %s): making it again", path, found, expected)
        return not damaged

    def _save(self) -> None:
        files.write_json(self.directory / "manifest.json", manifests.sealed(self.manifest))

    def _save_progress(self, figures: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            temporary = self.directory / ".progress.tmp"
            temporary.write_text(json.dumps(figures | {"at": time.time()}))
            os.replace(temporary, self.directory / "progress.json")

    def last_line(self) -> None:
        """Print the manifest on stdout if asked to, and the next command on the log."""
        if self.common.json and self.manifest:
            print(json.dumps(self.manifest, indent=2))
        if self.common.dry_run:
            logger.info("dry run: nothing was written or started")
        elif self._next:
            configuration = ["--config", self.common.config] if self.common.config else []
            words = ["python", self._next, *configuration, "--run-dir", str(self.run_dir)]
            logger.info("next: %s", shlex.join(words))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _seconds_spent(previous: dict[str, Any] | None) -> float:
    seconds = (previous or {}).get("seconds", {})
    return float(seconds.get("before", 0.0)) + float(seconds.get("this_run", 0.0))
