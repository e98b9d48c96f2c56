"""The parent's side of capture: start the child, send it batches, check what comes back."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.common.processes import Child
from eagle3.common.stage import Stage
from eagle3.drafter.verifier import Verifier
from eagle3.engines import arguments, defaults, stall
from eagle3.states.settings import CONVENTION, CaptureSettings
from eagle3.states.store import FP8, FP8_FORM, Sample, StateStore

if TYPE_CHECKING:
    import torch

# Agreement is judged once this many samples (or log-probabilities) are in; a few rounding ties must not decide.
_ENOUGH_SAMPLES = 20
# Mean absolute difference of log-probabilities (nats) that is noise, by what the files hold. On SmolLM2-135M it is
# 0.000 in float32, 0.029 in bfloat16 (vLLM on a CPU) and 0.09 in fp8.
_LARGEST_DIFFERENCE = {"float32": 0.01, "bfloat16": 0.15, "float16": 0.15, FP8: 0.3}
# Of how many samples of the first batch how many tokens are compared: the engine's logits of them take memory.
_PROVED_SAMPLES, _PROVED_TOKENS = 8, 128


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
        self._stage, self._engine, self._store, self._settings = stage, engine, store, settings
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

        Returns an entry per wanted sample: {i, tokens, bytes, sha256, next_token, next_logprob} or {i, error}.
        """
        jobs = [[sample.i, sample.input_ids] for sample in batch]
        write = sorted(wanted) if wanted is not None else [number for number, _ in jobs]
        self._send(json.dumps({"jobs": jobs, "write": write}))
        return self._receive(self._timeout_s)["entries"]

    def prove(self, samples: list[Sample]) -> dict[int, list[float]]:
        """Return the engine's own log-probabilities of tokens 1, 2, … of the first few samples' beginnings."""
        jobs = [[sample.i, sample.input_ids[:_PROVED_TOKENS]] for sample in samples[:_PROVED_SAMPLES]]
        self._send(json.dumps({"prove": jobs}))
        return {int(number): said for number, said in self._receive(self._timeout_s)["logprobs"].items()}

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
    """Proof that the stored teacher states, with the verifier's norm and head, are its distribution.

    lm_head(final_norm(stored state of the last token)) must give the token that the engine itself produced next: a
    wrong layer, a state stored after the norm, or a shifted capture fails on most samples; rounding ties fail on a few.
    And the log-probabilities of that token, and once of all tokens of a few beginnings, must be the engine's within
    the noise of its precision: a scale or a cap of the logits leaves every most likely token what it is.
    """

    def __init__(self, verifier: Verifier, store: StateStore, minimum: float, dtype: str, form: str) -> None:
        """Load norm and head.

        Args:
            minimum: share of samples that has to agree. dtype: of the engine. form: what the files hold, dtype or fp8.
        """
        import torch

        from eagle3.drafter.teacher import TeacherHead

        self._head = TeacherHead(verifier, getattr(torch, dtype))
        self._store, self._minimum, self._largest = store, minimum, _LARGEST_DIFFERENCE[form]
        self.agreed = self.checked = self.compared = 0
        self._difference = 0.0

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Check finished samples by reading their last row back from disk; raise when too many disagree."""
        import torch

        if not entries:
            return
        rows = torch.stack([self._store.last_teacher(entry["i"]) for entry in entries])
        expected = torch.tensor([entry["next_token"] for entry in entries])
        self.agreed += int((self._head.logits(rows).argmax(-1) == expected).sum())
        self.checked += len(entries)
        self._compare(rows, expected, [entry["next_logprob"] for entry in entries])
        self.judge(_ENOUGH_SAMPLES)

    def add_prompts(self, said: dict[int, list[float]]) -> None:
        """Check the beginnings of finished samples: `said` has the engine's log-probability of tokens 1, 2, …"""
        for number, logprobs in said.items():
            states, ids = self._store.load(number)
            self._compare(states[: len(logprobs), -1], ids[1 : 1 + len(logprobs)], logprobs)
        self.judge(_ENOUGH_SAMPLES)

    def _compare(self, states: "torch.Tensor", tokens: "torch.Tensor", logprobs: list[float]) -> None:
        import torch

        ours = self._head.log_probabilities(states, tokens)
        self._difference += float((ours - torch.tensor(logprobs)).abs().sum())
        self.compared += len(logprobs)

    @property
    def ratio(self) -> float:
        """Share of checked samples that agree (1.0 before the first)."""
        return self.agreed / self.checked if self.checked else 1.0

    @property
    def difference(self) -> float:
        """Mean absolute difference of log-probabilities, in nats."""
        return self._difference / self.compared if self.compared else 0.0

    def figures(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        return {"agreement": self.ratio, "logprob_difference": round(self.difference, 6),
                "logprobs_compared": self.compared}

    def judge(self, enough: int = 1) -> None:
        """Raise PreconditionError when `enough` is known and it is not the engine's distribution."""
        if self.checked >= enough and self.ratio < self._minimum:
            raise PreconditionError(
                "the captured teacher states do not give the engine's own next tokens",
                where=self._store.files,
                expected=f"agreement on at least {self._minimum:.0%} of the samples",
                found=f"{self.agreed} of {self.checked} ({self.ratio:.0%})",
                fix="check model.layers and the model folder (weights of another model?); --min-agreement lowers the "
                "bar",
            )
        if self.compared >= enough and not self.difference <= self._largest:
            raise PreconditionError(
                "the captured teacher states do not give the engine's own probabilities",
                where=self._store.files,
                expected=f"log-probabilities that differ by at most {self._largest} in the mean",
                found=f"{self.difference:.3f} over {self.compared} tokens; the most likely token agrees on "
                f"{self.agreed} of {self.checked} samples",
                fix="check the model folder (weights of another model?); a family that scales or caps its logits, or "
                "has another norm, has to be in eagle3/drafter/output.py: its drafter would learn wrong probabilities",
            )
