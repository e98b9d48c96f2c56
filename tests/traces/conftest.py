"""Stage 01 in this process."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.project import load_script
from support.stage_01 import SCRIPT, command

from eagle3.common.options import GenerateOptions
from eagle3.common.script import run_script


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """The script of stage 01 as a module."""
    return load_script(SCRIPT.stem)


@pytest.fixture
def stage_01(script: ModuleType, tmp_path: Path, kept_handlers: None) -> Callable[..., int]:
    """Run the stage in this process on tmp_path/run; return its exit code."""
    return lambda stub, *arguments: run_script(
        script.__doc__, GenerateOptions, script.run, [str(SCRIPT), *command(tmp_path, stub), *arguments])
