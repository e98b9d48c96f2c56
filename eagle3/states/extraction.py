"""The parent's side of capture: start the child, send it batches, check what comes back."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, Queue
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.processes import Child
from eagle3.common.stage import Stage
from eagle3.drafter.verifier import TeacherHead, Verifier
from eagle3.engines import arguments, defaults
from eagle3.states.settings import CONVENTION, CaptureSettings
from eagle3.states.store import FP8, FP8_FORM, Sample, StateStore

# Agreement is judged once this many samples are in; a few rounding ties must not decide.
_ENOUGH_SAMPLES = 20


def batches(samples: list[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Cut the samples, in order, into batches of at most `batch_tokens` tokens.

    The cut depends only on the list, never on what is done already: a batch that is run again after a crash
    has the same members, and so the same rounding and the same bytes.
    """
    batch: list[Sample] = []
    tokens = 0
    for sample in samples:
        if batch and tokens + len(sample.input_ids) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += len(sample.input_ids)
    if batch:
        yield batch


def settings_for(
    facts: Verifier, layers: list[int], model: ModelOptions, engine: EngineOptions, store: StateStore, *,
    backend: str, dtype: str, max_length: int, batch_tokens: int, states_dtype: str = "auto",
) -> CaptureSettings:
    """Return what a capture into `store` is told.

    Args:
        layers: of `facts`, resolved. dtype: resolved as well. batch_tokens: raised to max_length if below.
    """
    about = {"model": facts.folder.name, "layers": layers, "convention": CONVENTION, "dtype": dtype}
    if states_dtype == FP8:
        about["states"] = FP8_FORM
    own = [*defaults.mla_on_cpu_args(engine, facts.folder), *engine.args] if backend == "vllm" else []
    return CaptureSettings(
        backend=backend, model=str(model.path), trust_remote_code=model.trust_remote_code, layers=tuple(layers),
        num_layers=facts.num_layers, dtype=dtype, states_dtype=states_dtype, max_length=max_length,
        batch_tokens=max(batch_tokens, max_length), tensor_parallel_size=engine.tensor_parallel_size,
        engine_args=tuple(own), directory=str(store.files), metadata={"capture": json.dumps(about)})


class Capture:
    """A capture child on one verifier; a context manager that ends it with everything it started."""

    def __init__(self, stage: Stage, engine: EngineOptions, store: StateStore, settings: CaptureSettings) -> None:
        self._stage, self._store, self._settings = stage, store, settings
        self._timeout_s = engine.startup_timeout_min * 60
        inside = settings.backend == "vllm"
        python = engine.python if inside else None
        self._command = [python or sys.executable, "-m", "eagle3.states.engine_side"]
        self._env = engine_environment(engine) if inside else {}
        self._label = "capture"

    def __enter__(self) -> "Capture":
        self._store.files.mkdir(parents=True, exist_ok=True)
        log = self._stage.run_dir / "logs" / f"{self._stage.directory.name}-{self._label}.log"
        self._child = Child(self._command, log_path=log, env=self._env, piped=True)
        self._stage.interrupt.on_stop(lambda: (self._child.stop(), None)[1])
        self._replies: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        logger.info("loading the verifier for capture (its log: %s)", log)
        started = time.monotonic()
        try:
            self._send(self._settings.to_json())
            ready = self._receive(self._timeout_s, waiting="loading")
        except BaseException:
            self._child.stop()
            raise
        logger.info("capture is ready after %.0f s; decoder at %s", time.monotonic() - started, ready["ready"])
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def run(self, batch: list[Sample], wanted: set[int] | None = None) -> list[dict[str, Any]]:
        """Run a batch and write its wanted samples (default: all).

        Returns an entry per wanted sample: {i, tokens, bytes, sha256, next_token} or {i, error}.
        """
        jobs = [[sample.i, sample.input_ids] for sample in batch]
        write = sorted(wanted) if wanted is not None else [number for number, _ in jobs]
        self._send(json.dumps({"jobs": jobs, "write": write}))
        return self._receive(self._timeout_s)["entries"]

    def _send(self, line: str) -> None:
        try:
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _read(self) -> None:
        for line in self._child.stdout:
            self._replies.put(line.decode())
        self._replies.put("")

    def _receive(self, timeout_s: float, waiting: str = "") -> dict[str, Any]:
        deadline, next_echo = time.monotonic() + timeout_s, time.monotonic() + 30
        while time.monotonic() < deadline:
            if waiting:
                self._stage.check_stop()
            try:
                line = self._replies.get(timeout=0.2)
            except Empty:
                if waiting and time.monotonic() > next_echo:
                    next_echo += 30
                    logger.info("%s: %s", waiting, self._child.tail(1)[-160:])
                continue
            if not line:
                raise self._died()
            return json.loads(line)
        raise PreconditionError(
            "the capture process does not answer",
            where=self._child.log_path,
            expected=f"an answer within {timeout_s / 60:.0f} minutes",
            found=self._child.tail(),
            fix="raise --engine-startup-timeout-min if it was still loading",
        )

    def _died(self) -> PreconditionError:
        time.sleep(0.5)
        return PreconditionError(
            "the capture process ended",
            where=self._child.log_path,
            found=f"exit code {self._child.poll()}; its last lines:\n{self._child.tail(25)}",
            fix="mend the cause named there and run the same command again; finished samples are kept",
        )


def engine_environment(engine: EngineOptions) -> dict[str, str]:
    """Return the environment for the engine: its defaults on this machine, then the user's."""
    return {**defaults.default_env(engine), **defaults.one_process_on_cpu(engine), **engine.env}


def resolve_dtype(requested: str, engine: EngineOptions) -> str:
    """Return the verifier's precision for capture: as asked, else the server's, so that states fit its replies."""
    if requested != "auto":
        return requested
    given = arguments.value([*defaults.cpu_args(engine), *engine.args], "--dtype") or "auto"
    return {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(given, given)


class AgreementCheck:
    """Proof that the stored teacher state is the right one.

    lm_head(final_norm(stored state of the last token)) must give the token that the engine itself produced
    next. A wrong layer, a state stored after the norm, or a shifted capture fails on most samples; rounding
    ties fail on a few.
    """

    def __init__(self, verifier: Verifier, store: StateStore, minimum: float) -> None:
        self._head = TeacherHead(verifier)
        self._store, self._minimum = store, minimum
        self.agreed = self.checked = 0

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Check finished samples by reading their last row back from disk; raise when too many disagree."""
        import torch

        if not entries:
            return
        rows = [self._store.last_teacher(entry["i"]) for entry in entries]
        expected = torch.tensor([entry["next_token"] for entry in entries])
        self.agreed += int((self._head.next_tokens(torch.stack(rows)) == expected).sum())
        self.checked += len(entries)
        if self.checked >= _ENOUGH_SAMPLES:
            self.judge()

    @property
    def ratio(self) -> float:
        """Share of checked samples that agree (1.0 before the first)."""
        return self.agreed / self.checked if self.checked else 1.0

    def judge(self) -> None:
        """Raise PreconditionError when the share is below the minimum."""
        if self.ratio < self._minimum:
            raise PreconditionError(
                "the captured teacher states do not give the engine's own next tokens",
                where=self._store.files,
                expected=f"agreement on at least {self._minimum:.0%} of the samples",
                found=f"{self.agreed} of {self.checked} ({self.ratio:.0%})",
                fix="check model.layers and the model folder (weights of another model?); --min-agreement lowers "
                "the bar for models whose head is not lm_head(norm(state))",
            )
