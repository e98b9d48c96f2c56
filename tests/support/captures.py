"""Captures without a stage: the transformers backend in this process, or any backend in a child."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.drafter import verifier
from eagle3.states import engine_side, extraction
from eagle3.states.collecting import Collected, Collector
from eagle3.states.slabs import Receiver
from eagle3.states.store import Sample, StateStore
from eagle3.states.writing import Writer


def samples_of(sequences: dict[int, list[int]]) -> list[Sample]:
    """Return samples that are generated from their second token on."""
    return [Sample(i, f"trace-{i}", "", ids, [0] + [1] * (len(ids) - 1)) for i, ids in sequences.items()]


class InProcess:
    """The transformers backend, its passes and files in this process."""

    def __init__(self, folder: Path, store: StateStore, receiver: Receiver, layers: list[int], **more: Any) -> None:
        self.facts = verifier.read(folder)
        given = {"backend": "hf", "dtype": "float32", "max_length": 64, "batch_tokens": 64} | more
        settings = extraction.settings_for(self.facts, self.facts.layers(layers), ModelOptions(path=str(folder)),
                                           EngineOptions(), **given)
        store.files.mkdir(parents=True, exist_ok=True)
        self.collector = Collector(receiver, Writer(store.files, extraction.metadata(settings)))
        self.backend = engine_side.TransformersBackend(
            extraction.dataclasses.replace(settings, address=receiver.address))
        self.sent = 0

    def run(self, sequences: dict[int, list[int]]) -> Collected:
        """Capture sequences as one batch."""
        self.sent += 1
        self.collector.expect(self.sent, samples_of(sequences), set(sequences))
        said = self.backend.run(self.sent, [*sequences.items()])
        collected = self.collector.result(self.sent)
        collected.entries = [entry if "error" in entry else entry | said["next"][entry["i"]]
                             for entry in collected.entries]
        return collected

    def prove(self, sequences: dict[int, list[int]]) -> dict[int, list[float]]:
        """Return the model's own log-probabilities."""
        self.sent += 1
        self.collector.expect(self.sent, [], set())
        found = self.backend.prove(self.sent, [*sequences.items()])["logprobs"]
        self.collector.result(self.sent)
        return found  # type: ignore[no-any-return]


@contextmanager
def in_process(folder: Path, store: StateStore, layers: list[int], **more: Any) -> Iterator[InProcess]:
    """Yield a capture of the model in `folder` into `store`; `more` as `settings_for` takes it."""
    with Receiver() as receiver:
        yield InProcess(folder, store, receiver, layers, **more)


def stage_at(run_dir: Path, store: StateStore) -> Any:
    """Return as much of a stage as `extraction.Capture` needs."""
    return SimpleNamespace(run_dir=run_dir, directory=store.directory, check_stop=lambda: None,
                           interrupt=SimpleNamespace(on_stop=lambda _: None))
