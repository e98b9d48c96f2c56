"""What hidden states take on disk."""

from collections.abc import Iterable

from eagle3.common.options import ExtractSection
from eagle3.states.store import Sample, bytes_per_token


def stored_as(extract: ExtractSection, dtype: str) -> str:
    """Return what the values in the files are: fp8, or the verifier's precision `dtype`."""
    return dtype if extract.states_dtype == "auto" else extract.states_dtype


def bytes_needed(samples: Iterable[Sample], hidden_size: int, dtype: str) -> int:
    """Return the bytes that the states of these samples take on disk, their values stored as `dtype`."""
    return sum(len(sample.input_ids) for sample in samples) * bytes_per_token(hidden_size, dtype)
