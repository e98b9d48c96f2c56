"""Hidden states out of a running verifier: hooks inside vLLM's workers, and a transformers reference.

Runs as a child process in the engine's interpreter (`python -m eagle3.states.engine_side`), so it needs nothing that
the engine does not bring: torch and safetensors. The parent sends one JSON line per batch and gets one line
per batch back; the states go straight to their final files. With them comes what the engine itself says of the tokens:
the log-probabilities by which the parent proves states, norm and head.
"""

import hashlib
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.states.recorder import Recorder, assign
from eagle3.states.settings import CaptureSettings
from eagle3.states.store import FP8, SCALES, encode_fp8

_WRITERS = 4


class Writer:
    """Writes samples to hs_{i}.safetensors in the background, checked for NaN and Inf first; `fp8`: in that form."""

    def __init__(self, directory: Path, metadata: dict[str, str], *, fp8: bool = False) -> None:
        self.directory, self.metadata, self.fp8 = directory, metadata, fp8
        self._pool = ThreadPoolExecutor(_WRITERS)

    @classmethod
    def of(cls, settings: CaptureSettings) -> "Writer":
        """Return the writer that a capture wants."""
        return cls(Path(settings.directory), settings.metadata, fp8=settings.states_dtype == FP8)

    def submit(self, number: int, token_ids: list[int], states: Any) -> "Future[dict[str, Any]]":
        """Start writing `states` [T, slots, H]; the future gives the sample's entry or its error."""
        import torch

        bad = ~torch.isfinite(states)
        if bad.any():
            slots = {slot: int(count) for slot, count in enumerate(bad.sum(dim=(0, 2)).tolist()) if count}
            return self._pool.submit(
                lambda: {"i": number, "error": f"NaN or Inf: {slots} values by layer slot of {states[:, 0].numel()}"}
            )
        tensors = {"hidden_states": states}
        if self.fp8:  # before the copy off the GPU, which it halves
            tensors["hidden_states"], tensors[SCALES] = encode_fp8(states)
        on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        return self._pool.submit(self._write, number, token_ids, on_cpu)

    def _write(self, number: int, token_ids: list[int], states: dict[str, Any]) -> dict[str, Any]:
        import torch
        from safetensors.torch import save

        tensors = states | {"token_ids": torch.tensor(token_ids, dtype=torch.int64)}
        data = save(tensors, metadata=self.metadata)
        files.write_bytes(self.directory / f"hs_{number}.safetensors", data)
        return {"i": number, "tokens": len(token_ids), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# --- inside a vLLM worker --------------------------------------------------------------------------------


class CaptureExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by collective_rpc.

    With tensor parallelism every rank holds the whole residual stream, so rank 0 alone records.
    """

    def capture_start(self, settings: str) -> str:
        """Install hooks on rank 0; `settings` is the JSON of CaptureSettings."""
        options = CaptureSettings.from_json(settings)
        self._recorder: Recorder | None = None
        if self.rank != 0:  # type: ignore[attr-defined]
            return ""
        self._recorder = Recorder(self.model_runner.model, options.layers, options.num_layers)  # type: ignore[attr-defined]
        self._writer = Writer.of(options)
        return self._recorder.path

    def capture_collect(self, jobs: str) -> str:
        """Write the samples of the passes since the last call; JSON in, JSON list of entries out."""
        if self._recorder is None:
            return ""
        message = json.loads(jobs)
        return json.dumps(write_batch(self._recorder, self._writer, message["jobs"], message["write"]))


def write_batch(
    recorder: Recorder, writer: Writer, jobs: list[tuple[int, list[int]]], wanted: list[int]
) -> list[dict[str, Any]]:
    """Assign what was recorded to the jobs, write the wanted samples, return an entry for each of those."""
    complete, missing = assign(recorder.take(), jobs)
    futures = [writer.submit(number, ids, complete[number]) for number, ids in jobs
               if number in complete and number in wanted]
    return [future.result() for future in futures] + [
        {"i": number, "error": why} for number, why in missing.items() if number in wanted]


# --- the child process -----------------------------------------------------------------------------------


class VllmBackend:
    """Prefill through vLLM's LLM class, without prefix caching; one sampled token ends each request.

    Log-probabilities are asked with 0 alternatives: that of the token alone.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        # In one process the scheduler sees a whole batch before its first step: batches, and with them the
        # rounding of every state, do not depend on the moment at which a request arrives.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        _let_llvmlite_be_looked_at()
        self.llm = LLM(**engine_arguments(settings))
        self.sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=0)
        self.proving = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
        self.path = next(filter(None, self.llm.collective_rpc("capture_start", args=(settings.to_json(),))))

    def run(self, jobs: list[tuple[int, list[int]]], wanted: list[int]) -> list[dict[str, Any]]:
        """Prefill all jobs together; write the wanted ones, with the engine's own next token in their entries."""
        prompts = [{"prompt_token_ids": ids} for _, ids in jobs]
        outputs = self.llm.generate(prompts, self.sampling, use_tqdm=False)
        own = {number: _own_next(out.outputs[0]) for (number, _), out in zip(jobs, outputs, strict=True)}
        return [entry | own[entry["i"]] for entry in self._collect(jobs, wanted)]

    def prove(self, jobs: list[tuple[int, list[int]]]) -> dict[int, list[float]]:
        """Return the engine's log-probability of each token of each job but its first; nothing is written."""
        outputs = self.llm.generate([{"prompt_token_ids": ids} for _, ids in jobs], self.proving, use_tqdm=False)
        self._collect([], [])  # forget these passes
        return {number: [found[token].logprob for token, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
                for (number, ids), out in zip(jobs, outputs, strict=True)}

    def _collect(self, jobs: list[tuple[int, list[int]]], wanted: list[int]) -> list[dict[str, Any]]:
        replies = self.llm.collective_rpc("capture_collect", args=(json.dumps({"jobs": jobs, "write": wanted}),))
        return json.loads(next(filter(None, replies)))  # type: ignore[no-any-return]


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

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser
    defaults = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([]))
    given = vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*settings.engine_args]))
    chosen = {name: value for name, value in given.items() if value != defaults[name]}
    return chosen | {
        "model": settings.model,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_length + 1,
        "max_num_batched_tokens": settings.batch_tokens,
        "enable_prefix_caching": False,
        "enforce_eager": True,  # hooks do not run inside compiled graphs
        "worker_extension_cls": "eagle3.states.engine_side.CaptureExtension",
        "disable_log_stats": True,
    }


class TransformersBackend:
    """The reference: one sequence at a time through transformers, with the same hooks."""

    def __init__(self, settings: CaptureSettings) -> None:
        import torch

        self.model = _in_transformers(settings).to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.recorder = Recorder(self.model, settings.layers, settings.num_layers)
        self.path = self.recorder.path
        self.writer = Writer.of(settings)

    def run(self, jobs: list[tuple[int, list[int]]], wanted: list[int]) -> list[dict[str, Any]]:
        """Run the wanted jobs one by one and return their entries with the model's own next token."""
        import torch

        entries = []
        for number, ids in jobs:
            if number not in wanted:
                continue  # one sequence a pass: the others do not change its rounding
            logits = self._logits(ids)[-1]
            for current in self.recorder.passes:  # the batch dimension is 1
                current["tokens"], current["positions"] = current["tokens"][0], torch.arange(len(ids))
                current["streams"] = {slot: value[0] for slot, value in current["streams"].items()}
            (entry,) = write_batch(self.recorder, self.writer, [(number, ids)], wanted)
            token = int(logits.argmax())
            entries.append(entry | {"next_token": token, "next_logprob": float(logits.log_softmax(-1)[token])})
        return entries

    def prove(self, jobs: list[tuple[int, list[int]]]) -> dict[int, list[float]]:
        """Return the model's log-probability of each token of each job but its first; nothing is written."""
        import torch

        found = {}
        for number, ids in jobs:
            said = self._logits(ids)[:-1].log_softmax(-1)
            found[number] = said[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
        self.recorder.passes = []
        return found

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


def main() -> None:
    """Serve batches: settings on the first line of stdin, then lines {"jobs": [[i, ids], …], "write": [i, …]}.

    A line {"prove": [[i, ids], …]} is answered with {"logprobs": {i: […]}} and writes nothing.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the engine's own prints go to the log, not between the replies
    settings = CaptureSettings.from_json(sys.stdin.readline())
    backend = (VllmBackend if settings.backend == "vllm" else TransformersBackend)(settings)
    print(json.dumps({"ready": backend.path}), file=replies, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        reply = ({"logprobs": backend.prove(message["prove"])} if "prove" in message
                 else {"entries": backend.run(message["jobs"], message["write"])})
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
