"""How a server drafts and accepts, and whether its rounds can be walked over the replies that it gave.

They can where the engine emits a draft exactly when it accepts it; docs/low-acceptance.md has the proof. Read in
vLLM 0.26 and 0.32 (vllm/config/speculative.py, vllm/v1/sample/rejection_sampler.py, and of the newer runner
vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py) and SGLang (python/sglang/srt/speculative/eagle_utils.py,
sgl-kernel/csrc/speculative/speculative_sampling.cuh).
"""

import contextlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.common.versions import numbers
from eagle3.engines import arguments
from eagle3.engines.servers import NO_ANSWER, Server, get

# Settings with what they are where nothing else is said.
_VLLM: dict[str, Any] = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
_SGLANG: dict[str, Any] = {
    "speculative_eagle_topk": 1, "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
    "speculative_use_rejection_sampling": False,
}
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
# vLLM takes a draft-token count for each batch size (seen in 0.25.1, not in 0.22.0).
_SCHEDULES_FROM = (0, 25, 1)


def settings(kind: str, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return how a server that is started with these arguments drafts and accepts."""
    if kind == "vllm":
        given: Any = {}
        with contextlib.suppress(ValueError):
            given = json.loads(arguments.value(words, "--speculative-config") or "{}")
        given = given if isinstance(given, dict) else {}
        inner = {name: arguments.value(words, f"--speculative-config.{name.replace('_', '-')}") for name in _VLLM}
        return {name: inner[name] or given.get(name, default) for name, default in _VLLM.items()}
    found: dict[str, Any] = {}
    for name, default in _SGLANG.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            found[name] = arguments.given(words, flag)
        else:
            found[name] = _number(arguments.value(words, flag), default)
    return found | {_SIMULATED: _number({**os.environ, **env}.get(_SIMULATED), 0.0)}


def of_server(server: Server, words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return how a server drafts and accepts: by what it says, else by the arguments and environment it was started
    with. Of a server that somebody else started and that does not say, nothing is known: {}."""
    given = settings(server.kind, words, env) if server.child is not None else {}
    return given | told(server)


def told(server: Server) -> dict[str, Any]:
    """Return how a running server says that it drafts and accepts; {} where it does not say (vLLM does not)."""
    if server.kind != "sglang":
        return {}
    with contextlib.suppress(*NO_ANSWER):
        answer = json.loads(get(f"{server.root_url}/server_info"))
        return {name: answer[name] for name in _SGLANG if answer.get(name) is not None}
    return {}


def refusal(kind: str, found: Mapping[str, Any], temperature: float) -> str:
    """Return why the rounds of a server with these settings cannot be walked over its replies; "" when they can."""
    if kind == "vllm":
        return _vllm_refusal({**_VLLM, **found}, sampled=temperature > 0)
    found = {**_SGLANG, **found}
    if _number(found.get(_SIMULATED), 0.0) > 0:
        return f"{_SIMULATED} makes SGLang accept by lot, whatever the verifier says"
    if found["speculative_use_rejection_sampling"]:
        return "with speculative_use_rejection_sampling SGLang draws its drafts instead of taking the most likely token"
    if int(found["speculative_eagle_topk"]) != 1:
        return f"SGLang drafts a tree (speculative_eagle_topk {found['speculative_eagle_topk']}); a chain is walked"
    thresholds = [float(found[f"speculative_accept_threshold_{name}"]) for name in ("single", "acc")]
    if temperature > 0 and thresholds != [1.0, 1.0]:
        return f"SGLang's thresholds of acceptance are {thresholds}: below 1 it accepts more than it would have drawn"
    return ""


def _vllm_refusal(found: Mapping[str, Any], *, sampled: bool) -> str:
    method = found["rejection_sample_method"]
    if method == "synthetic":
        return "with rejection_sample_method=synthetic vLLM accepts by lot, whatever the verifier says"
    if sampled and found["draft_sample_method"] != "greedy":
        return (f"with draft_sample_method={found['draft_sample_method']} vLLM draws its drafts, and may accept or "
                "reject what the reply has")
    if sampled and method != "standard":
        return f"with rejection_sample_method={method} vLLM judges drafts together; that it can be walked is not shown"
    return ""


def serve_line(kind: str, model: str, drafter: str, draft_tokens: int, schedule: list[list[int]] | None = None) -> str:
    """Return the command that serves a verifier with so many draft tokens; 0: without the drafter.

    Args:
        schedule: [first, last, draft tokens] by requests in flight, for a vLLM that takes one.
    """
    if kind == "vllm":
        words = ["vllm", "serve", model]
        most = max([draft_tokens, *(count for _, _, count in schedule or [])])
        if most:
            given = {"method": "eagle3", "model": drafter, "num_speculative_tokens": most}
            more = {"num_speculative_tokens_per_batch_size": schedule} if schedule else {}
            words += ["--speculative-config", json.dumps(given | more)]
        return shlex.join(words)
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    if draft_tokens:
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter,
                  "--speculative-num-steps", str(draft_tokens), "--speculative-eagle-topk", "1",
                  "--speculative-num-draft-tokens", str(draft_tokens + 1)]
    return shlex.join(words)


def has_schedules(version: str | None) -> bool:
    """Say whether this vLLM takes `num_speculative_tokens_per_batch_size`."""
    return numbers(version) >= _SCHEDULES_FROM


def _number(text: Any, default: float) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return type(default)(text)
    return default
