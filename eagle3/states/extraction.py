"""The parent's side of capture: start the child, send it batches, check what comes back."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.processes import Child
from eagle3.common.stage import Stage
from eagle3.drafter.verifier import Verifier
from eagle3.engines import arguments, defaults, stall
from eagle3.states.collecting import Collected, Collector
from eagle3.states.encoding import FP8, FP8_FORM
from eagle3.states.settings import CaptureSettings
from eagle3.states.slabs import Receiver
from eagle3.states.store import Sample, StateStore
from eagle3.states.writing import Writer

CONVENTION = "aux: residual stream entering the layer; last: output of the last decoder layer before the final norm"
# Of how many samples of the first batch how many tokens are compared: the engine's logits of them take memory.
_PROVED_SAMPLES, _PROVED_TOKENS = 8, 128
_AHEAD = 2  # batches that wait at the engine while one runs: it never waits for the stage


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
    facts: Verifier, layers: list[int], model: ModelOptions, engine: EngineOptions, *, backend: str, dtype: str,
    max_length: int, batch_tokens: int, states_dtype: str = "auto", capture: str = "auto", compiled: bool = False,
) -> CaptureSettings:
    """Return what a capture is told.

    Args:
        layers: of `facts`, resolved. dtype: resolved as well. batch_tokens: raised to max_length if below.
        capture, compiled: as in CaptureSettings.
    """
    own = [] if backend == "hf" else [*defaults.mla_on_cpu_args(engine, facts.folder), *engine.args]
    return CaptureSettings(
        backend=backend, model=str(model.path), trust_remote_code=model.trust_remote_code, layers=tuple(layers),
        num_layers=facts.num_layers, hidden_size=facts.hidden_size, dtype=dtype, states_dtype=states_dtype,
        capture=capture, compiled=compiled, max_length=max_length, batch_tokens=max(batch_tokens, max_length),
        tensor_parallel_size=engine.tensor_parallel_size, engine_args=tuple(own))


def metadata(settings: CaptureSettings) -> dict[str, str]:
    """Return what each file says of itself. One entry: safetensors writes several in random order, and the same states
    would differ in bytes."""
    about = {"model": Path(settings.model).name, "layers": [*settings.layers], "convention": CONVENTION,
             "dtype": settings.dtype}
    if settings.states_dtype == FP8:
        about["states"] = FP8_FORM
    return {"capture": json.dumps(about)}


class Capture:
    """A capture child on one verifier; a context manager that ends it with everything it started.

    `how` says by what way the states are taken: outputs or hooks (`eagle3.states.recorder`).
    """

    def __init__(self, stage: Stage, engine: EngineOptions, store: StateStore, settings: CaptureSettings) -> None:
        self._stage, self._engine, self._store, self._settings = stage, engine, store, settings
        self._timeout_s = engine.startup_timeout_min * 60
        inside = settings.backend != "hf"
        python = engine.python if inside else None
        self._command = [python or sys.executable, "-m", "eagle3.states.engine_side"]
        self._env = engine_environment(engine) if inside else {}
        self._label = "capture"
        self._sent = 0
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> "Capture":
        self._store.files.mkdir(parents=True, exist_ok=True)
        log = self._stage.run_dir / "logs" / f"{self._stage.directory.name}-{self._label}.log"
        receiver = self._ended.enter_context(Receiver())
        writer = Writer(self._store.files, metadata(self._settings))
        self._ended.callback(writer.close)
        self._collector = Collector(receiver, writer)
        self._child = Child(self._command, log_path=log, env=self._env, piped=True)
        self._ended.callback(self._child.stop)
        self._stage.interrupt.on_stop(lambda: (self._child.stop(), None)[1])
        self._replies: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        logger.info("loading the verifier for capture (its log: %s)", log)
        started = time.monotonic()
        try:
            self._send(dataclasses.replace(self._settings, address=receiver.address).to_json())
            ready = self._receive(self._timeout_s, waiting="loading")
        except BaseException:
            self._ended.close()
            raise
        self.how = ready["how"]
        logger.info("capture is ready after %.0f s; decoder at %s, states by %s", time.monotonic() - started,
                    ready["ready"], "the model's own outputs" if self.how == "outputs" else "hooks on its layers")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def run(self, batch: list[Sample], wanted: set[int] | None = None) -> Collected:
        """Run a batch and write its wanted samples (default: all).

        Entries are {i, tokens, bytes, sha256, next_token, next_logprob} or {i, error}.
        """
        return next(self.run_all([(batch, wanted)]))

    def run_all(self, work: Iterable[tuple[list[Sample], set[int] | None]]) -> Iterator[Collected]:
        """Yield what became of each (batch, its wanted samples), as `run` does; the engine gets batches ahead."""
        sent: deque[int] = deque()
        for batch, wanted in work:
            sent.append(self._start(batch, {sample.i for sample in batch} if wanted is None else wanted))
            if len(sent) > _AHEAD:
                yield self._finish(sent.popleft())
        while sent:
            yield self._finish(sent.popleft())

    def prove(self, samples: list[Sample]) -> dict[int, list[float]]:
        """Return the engine's own log-probabilities of tokens 1, 2, … of the first few samples' beginnings."""
        jobs = [[sample.i, sample.input_ids[:_PROVED_TOKENS]] for sample in samples[:_PROVED_SAMPLES]]
        number = self._announce([], set())
        self._send(json.dumps({"batch": number, "prove": jobs}))
        said = self._receive(self._timeout_s)["logprobs"]
        self._collector.result(number)
        return {int(number): logprobs for number, logprobs in said.items()}

    def _announce(self, batch: list[Sample], wanted: set[int]) -> int:
        self._sent += 1
        self._collector.expect(self._sent, batch, wanted)
        return self._sent

    def _start(self, batch: list[Sample], wanted: set[int]) -> int:
        if self._settings.backend == "hf":  # one sequence a pass: the others do not change its rounding
            batch = [sample for sample in batch if sample.i in wanted]
        number = self._announce(batch, wanted)
        self._send(json.dumps({"batch": number, "jobs": [[sample.i, sample.input_ids] for sample in batch]}))
        return number

    def _finish(self, number: int) -> Collected:
        reply = self._receive(self._timeout_s)
        if reply["ranks"]:
            raise PreconditionError(
                "the processes of tensor parallelism do not hold the same states", where=self._child.log_path,
                expected="the whole residual stream on every rank", found=reply["ranks"],
                fix="switch off what fuses or delays all-reduces (sequence parallelism, for instance) in --engine-args")
        collected = self._collector.result(number)
        own = {int(i): said for i, said in reply["next"].items()}
        collected.entries = [entry if "error" in entry else entry | own[entry["i"]] for entry in collected.entries]
        return collected

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
        watch = stall.Watch(self._engine, self._child) if waiting else None
        while time.monotonic() < deadline:
            if waiting:
                self._stage.check_stop()
            try:
                line = self._replies.get(timeout=0.2)
            except Empty:
                if watch:
                    watch.check()
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
        lines = 70 if self._settings.backend == "sglang" else 25  # behind its scheduler's traceback stand others
        return PreconditionError(
            "the capture process ended",
            where=self._child.log_path,
            found=f"exit code {self._child.poll()}; its last lines:\n{self._child.tail(lines)}",
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
