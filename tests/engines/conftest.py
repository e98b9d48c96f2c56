"""What the tests of engines share."""

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A verifier of which the configuration names the model type and nothing else."""
    folder = tmp_path / "verifier"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
