"""Fixtures that several test files share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Children inherit ignored signals, and `nohup ./test.sh &` ignores two of those that tests send to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `make_tiny_model`."""
    from support.models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def prepared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory with traces, states (transformers backend) and mapping of the tiny model; to be read only."""
    from support.pipeline import LAYERS, run_stage, write_traces

    run_dir = tmp_path_factory.mktemp("prepared")
    write_traces(run_dir, tiny_model, count=24)
    run_stage("02_extract_hidden_states.py", "--run-dir", run_dir, "--model", tiny_model, "--backend", "hf", "--dtype",
              "float32", "--layers", *LAYERS.split(), "--max-length", 64)
    run_stage("03_build_vocab_mapping.py", "--run-dir", run_dir, "--model", tiny_model, "--draft-vocab-size", 128)
    there = sorted(path.name for path in run_dir.iterdir())
    yield run_dir
    assert sorted(path.name for path in run_dir.iterdir()) == there, "a test wrote into the run that all share"


@pytest.fixture(scope="session")
def facts(tiny_model: Path):
    """What there is to know of the tiny model."""
    from eagle3.drafter import verifier

    return verifier.read(tiny_model)


@pytest.fixture
def drafter(tiny_model: Path, tmp_path: Path) -> Path:
    """The finished export of a run on the tiny model in tmp_path/run, trained on layers 2, 4 and 5."""
    from support.pipeline import write_export

    return write_export(tmp_path / "run/05_export", tiny_model)


@pytest.fixture
def kept_handlers() -> Iterator[None]:
    """For scripts that run in this process: what they do with signals is taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put an nvidia-smi on the path that prints what it is told; return the function that tells it."""

    def tell(gpus, processes=(), links="GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X"):
        script = tmp_path / "bin" / "nvidia-smi"
        script.parent.mkdir(exist_ok=True)
        answers = {"gpu": "\n".join(gpus), "apps": "\n".join(processes), "topo": links}
        for name, text in answers.items():
            (tmp_path / name).write_text(text + "\n")
        script.write_text(f"""#!/bin/sh
case "$*" in
  *query-gpu*) cat '{tmp_path}/gpu' ;;
  *query-compute-apps*) cat '{tmp_path}/apps' ;;
  *) cat '{tmp_path}/topo' ;;
esac
""")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    return tell


@pytest.fixture(scope="session")
def parts(prepared, tiny_model):
    """(model factory, store, samples) of the prepared run."""
    from eagle3.drafter import network, verifier, vocab
    from eagle3.states.store import StateStore, load_dataset
    from eagle3.training import batches

    facts = verifier.read(tiny_model)
    d2t, t2d = vocab.load_mapping(prepared / "03_vocab" / vocab.MAPPING)
    store = StateStore(prepared / "02_states")
    samples = batches.read_samples(store, load_dataset(prepared / "02_states"))

    def build(**more):
        return network.build(facts, [2, 4, 5, 7], d2t, t2d, network.layer_shape(facts), **more)

    return build, store, samples


@pytest.fixture
def one_process():
    """Training that is alone, on the CPU."""
    import torch

    from eagle3.training import trainer as training

    return training.Processes(0, 1, torch.device("cpu"))
