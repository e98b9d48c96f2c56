"""What a capture's options stand for: by what the states are captured, and what they take on disk."""

from collections.abc import Iterable

from eagle3.common.errors import UsageError
from eagle3.common.options import EngineOptions, ExtractSection
from eagle3.states.encoding import bytes_per_token
from eagle3.states.store import Sample


def backend_of(extract: ExtractSection, engine: EngineOptions) -> str:
    """Return what states are captured with, vllm, sglang or hf; UsageError when the options contradict each other."""
    backend = engine.kind if extract.backend == "auto" else extract.backend
    if backend not in ("hf", engine.kind):
        raise UsageError("states are captured with the engine itself, or with hf", where="--backend",
                         expected=f"auto, {engine.kind} (--engine), or hf", found=backend)
    if backend == "sglang" and extract.capture == "outputs":
        raise UsageError("SGLang gives its streams to drafters alone", where="--capture", expected="auto, or hooks",
                         found="outputs")
    return backend


def stored_as(extract: ExtractSection, dtype: str) -> str:
    """Return what the values in the files are: fp8, or the verifier's precision `dtype`."""
    return dtype if extract.states_dtype == "auto" else extract.states_dtype


def bytes_needed(samples: Iterable[Sample], hidden_size: int, dtype: str) -> int:
    """Return the bytes that the states of these samples take on disk, their values stored as `dtype`."""
    return sum(len(sample.input_ids) for sample in samples) * bytes_per_token(hidden_size, dtype)
