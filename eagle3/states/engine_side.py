"""Hidden states out of a running verifier: vLLM, SGLang (`eagle3.states.sglang_side`), or transformers, the reference.

Runs as a child process in the engine's interpreter (`python -m eagle3.states.engine_side`), so it needs nothing that
the engine does not bring: torch and safetensors. The stage sends one JSON line a batch and gets one line a batch back,
with what the engine itself says of the tokens; what every pass gave goes to it through shared memory
(`eagle3.states.slabs`). It sends batches ahead, so that the engine never waits for it.
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

from eagle3.states.pass_sender import PassSender
from eagle3.states.recorder import LayerHooks, Pass, decoder_layers
from eagle3.states.self_check import ranks_agree
from eagle3.states.settings import CaptureSettings

_TAPPED = "eagle3_capture"  # as eagle3.states.vllm_worker has it
# From here on every model that serves EAGLE-3 gives the stream behind its last layer too (read in 0.26 and 0.32).
_OUTPUTS_SINCE = (0, 26)


class VllmBackend:
    """Prefill through vLLM's LLM class, without prefix caching; one sampled token ends each request.

    Log-probabilities are asked with 0 alternatives: that of the token alone.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        # In one process the scheduler sees a whole batch before its first step: batches, and with them the
        # rounding of every state, do not depend on the moment at which a request arrives.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"  # it would replay the whole model, hook and all
        from vllm import LLM, SamplingParams

        _let_llvmlite_be_looked_at()
        arguments = engine_arguments(settings)
        self.how = "outputs" if arguments["additional_config"][_TAPPED]["outputs"] else "hooks"
        self.llm = LLM(**arguments)
        self.sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=0)
        self.proving = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
        self.path = self.llm.collective_rpc("capture_start", args=(settings.to_json(),))[0]

    def run(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Prefill all jobs together; return the engine's own next tokens, and what its ranks disagree in."""
        outputs = self.llm.generate([{"prompt_token_ids": ids} for _, ids in jobs], self.sampling, use_tqdm=False)
        sums = self.llm.collective_rpc("capture_mark", args=(batch,))
        own = {number: _own_next(out.outputs[0]) for (number, _), out in zip(jobs, outputs, strict=True)}
        return {"next": own, "ranks": ranks_agree(sums)}

    def prove(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Return the engine's log-probability of each token of each job but its first."""
        outputs = self.llm.generate([{"prompt_token_ids": ids} for _, ids in jobs], self.proving, use_tqdm=False)
        self.llm.collective_rpc("capture_mark", args=(batch,))
        return {"logprobs": {
            number: [found[token].logprob for token, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
            for (number, ids), out in zip(jobs, outputs, strict=True)}}


def _own_next(output: Any) -> dict[str, Any]:
    """Return the token that vLLM gave next, and its log-probability."""
    token = int(output.token_ids[0])
    return {"next_token": token, "next_logprob": output.logprobs[0][token].logprob}


def _let_llvmlite_be_looked_at() -> None:
    """Keep vLLM on CPUs from failing where numba is loaded in its own process, as it is for Kimi-K2.5.

    vLLM 0.32 reads the `__dict__` of every object in every module; llvmlite's handle of its library has none, but
    answers any name, that one too, with a function.
    """
    try:
        from llvmlite.binding.ffi import lib
    except ImportError:
        return
    handle, found = type(lib), type(lib).__getattr__

    def symbols_only(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(self, name)

    handle.__getattr__ = symbols_only


def engine_arguments(settings: CaptureSettings) -> dict[str, Any]:
    """Return the keyword arguments for vllm.LLM: the user's engine.args, then what capture needs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser
    defaults = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([]))
    given = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*settings.engine_args]))
    chosen = {name: value for name, value in given.items() if value != defaults[name]} | {
        "model": settings.model,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_length + 1,
        "max_num_batched_tokens": settings.batch_tokens,
        "enable_prefix_caching": False,
        "worker_cls": "eagle3.states.vllm_worker.CaptureWorker",
        "disable_log_stats": True,
    }
    outputs = settings.capture == "outputs" or (settings.capture == "auto" and _gives_its_streams(chosen))
    if not outputs or not settings.compiled or current_platform.is_cpu():
        chosen["enforce_eager"] = True  # hooks on layers do not run inside compiled graphs
    # vLLM keeps compiled graphs by a key that knows nothing of the layers; this makes them part of it.
    tapped = {"layers": [*settings.layers], "num_layers": settings.num_layers, "outputs": outputs,
              "fp8": settings.states_dtype == "fp8"}
    return chosen | {"additional_config": {**(chosen.get("additional_config") or {}), _TAPPED: tapped}}


def _gives_its_streams(chosen: dict[str, Any]) -> bool:
    """Return whether the model's class serves EAGLE-3 in a version that gives the last layer's stream as well."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    from eagle3.common.versions import numbers

    if numbers(vllm.__version__) < _OUTPUTS_SINCE:
        return False
    config = EngineArgs(**chosen).create_model_config()
    found, _ = ModelRegistry.resolve_model_cls(config.architectures, config)
    return bool(supports_eagle3(found))


class TransformersBackend:
    """The reference: one sequence at a time through transformers, by hooks."""

    def __init__(self, settings: CaptureSettings) -> None:
        import torch

        self.how = "hooks"
        self.model = _in_transformers(settings).to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.path = decoder_layers(self.model, settings.num_layers)[0]
        self.hooks = LayerHooks(self.model, settings.layers, settings.num_layers)
        self.sender = PassSender(settings, self.model.device, first_rank=True)

    def run(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Run the jobs one by one; return the model's own next tokens."""
        import torch

        own = {}
        for number, ids in jobs:
            logits = self._logits(ids)
            places = torch.arange(len(ids), device=logits.device)
            streams = [each[0] for each in self.hooks.take()]
            passed = Pass(torch.tensor(ids, device=logits.device), places, streams, None)
            self.sender.send(passed, len(ids), 1, lambda rows, logits=logits: logits[rows])  # type: ignore[misc]
            token = int(logits[-1].argmax())
            own[number] = {"next_token": token, "next_logprob": float(logits[-1].log_softmax(-1)[token])}
        self.sender.mark(batch)
        return {"next": own, "ranks": ""}

    def prove(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Return the model's log-probability of each token of each job but its first."""
        import torch

        found = {}
        for number, ids in jobs:
            said = self._logits(ids)[:-1].log_softmax(-1)
            found[number] = said[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
        self.hooks.take()
        self.sender.mark(batch)
        return {"logprobs": found}

    def _logits(self, ids: list[int]) -> Any:
        """Return the logits [T, V], float32."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([ids], device=self.model.device), use_cache=False).logits[0].float()


def _in_transformers(settings: CaptureSettings) -> Any:
    """Return transformers' model; wrappers for images have another class, some models (gpt-oss) no fused attention."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    errors = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        for attention in ("sdpa", "eager"):
            try:
                return kind.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype),
                                            trust_remote_code=settings.trust_remote_code, attn_implementation=attention)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def _lines() -> Iterator[dict[str, Any]]:
    """Yield the messages of stdin, read ahead, so that whoever sends them does not wait for the engine."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(line)
        waiting.put("")

    threading.Thread(target=read, daemon=True).start()
    while line := waiting.get():
        yield json.loads(line)


def _backend(settings: CaptureSettings) -> Any:
    if settings.backend == "sglang":
        from eagle3.states.sglang_side import SglangBackend

        return SglangBackend(settings)
    return (VllmBackend if settings.backend == "vllm" else TransformersBackend)(settings)


def main() -> None:
    """Serve batches: settings on the first line of stdin, then lines {"batch": k, "jobs": [[i, ids], …]}.

    A batch is answered with {"batch": k, "next": {i: {next_token, next_logprob}}, "ranks": ""}; with "prove" for
    "jobs", with {"batch": k, "logprobs": {i: […]}}.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the engine's own prints go to the log, not between the replies
    settings = CaptureSettings.from_json(sys.stdin.readline())
    backend = _backend(settings)
    print(json.dumps({"ready": backend.path, "how": backend.how}), file=replies, flush=True)
    for message in _lines():
        batch = message["batch"]
        reply = backend.prove(batch, message["prove"]) if "prove" in message else backend.run(batch, message["jobs"])
        print(json.dumps(reply | {"batch": batch}), file=replies, flush=True)


if __name__ == "__main__":
    main()
