"""Fixtures that several test files share."""

import signal
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
def prepared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with traces, states (transformers backend) and mapping of the tiny model."""
    from support.pipeline import LAYERS, run_stage, write_traces

    run_dir = tmp_path_factory.mktemp("prepared")
    write_traces(run_dir, tiny_model, count=24)
    run_stage("02_extract_hidden_states.py", "--run-dir", run_dir, "--model", tiny_model, "--backend", "hf", "--dtype",
              "float32", "--layers", *LAYERS.split(), "--max-length", 64)
    run_stage("03_build_vocab_mapping.py", "--run-dir", run_dir, "--model", tiny_model, "--draft-vocab-size", 128)
    return run_dir
