"""Hidden states out of SGLang: its offline engine, with hooks on the decoder's layers (`eagle3.states.sglang_hooks`).

A batch is one message to the scheduler, since SGLang (0.5.8 and later) sends a list of token ids as a whole
(`_should_use_batch_tokenization` in managers/tokenizer_manager.py); the next is sent when it is through. So the passes,
and with them the rounding of every state, depend on the list alone.
"""

import argparse
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.states.self_check import ranks_agree
from eagle3.states.settings import CaptureSettings
from eagle3.states.sglang_hooks import specifications

# Of context: SGLang keeps a few positions of each request back (`max_req_len - 5` in managers/tp_worker.py).
SPARE_POSITIONS = 16
_SPARE_TOKENS = 4096  # of KV cache, beside two passes: a last page and a new token of each request
_CONNECT_S = 120
_ANSWER_S = 600


class SglangBackend:
    """Prefill through SGLang's Engine, without radix cache and chunks; one token ends each request."""

    how = "hooks"

    def __init__(self, settings: CaptureSettings) -> None:
        # SGLang wants a few positions beyond the longest request, and refuses them beyond the model's own.
        os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
        _refuse_beyond_the_model(settings)
        from sglang.srt.entrypoints.engine import Engine

        self._ranks = Ranks()
        hooks = specifications(settings, self._ranks.address)
        self._engine = Engine(server_args=server_arguments(settings, hooks))
        self._ranks.accept(settings.tensor_parallel_size)
        self._generate([[1, 2, 3, 4]])  # shows that every hook is in place
        warmed = self._ranks.ask(start=True)
        if not warmed[0]["passes"]:
            raise LookupError("SGLang ran a request, but no hook on its logits processor saw it")
        self.path = "SGLang's layers " + ", ".join(hook["target_modules"][0] for hook in hooks[:-1])

    def run(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Prefill all jobs together; return the engine's own next tokens, and what its ranks disagree in."""
        outputs = self._generate([ids for _, ids in jobs])
        sums = [answer["checksums"] for answer in self._ranks.ask(mark=batch)]
        own = {}
        for (number, _), output in zip(jobs, outputs, strict=True):
            logprob, token = output["meta_info"]["output_token_logprobs"][0][:2]
            own[number] = {"next_token": int(token), "next_logprob": float(logprob)}
        return {"next": own, "ranks": ranks_agree(sums) if jobs else ""}

    def prove(self, batch: int, jobs: list[tuple[int, list[int]]]) -> dict[str, Any]:
        """Return the engine's log-probability of each token of each job but its first."""
        outputs = self._generate([ids for _, ids in jobs], prompts=True)
        self._ranks.ask(mark=batch)
        found = {}
        for (number, ids), output in zip(jobs, outputs, strict=True):
            said = output["meta_info"]["input_token_logprobs"][1 - len(ids):] if len(ids) > 1 else []
            if [int(each[1]) for each in said] != ids[1:]:
                raise ValueError(f"SGLang gave log-probabilities of other tokens than those of job {number}")
            found[number] = [float(each[0]) for each in said]
        return {"logprobs": found}

    def _generate(self, prompts_ids: list[list[int]], *, prompts: bool = False) -> list[dict[str, Any]]:
        if not prompts_ids:
            return []
        found: list[dict[str, Any]] = self._engine.generate(
            input_ids=prompts_ids, sampling_params={"max_new_tokens": 1, "temperature": 0.0}, return_logprob=True,
            logprob_start_len=0 if prompts else -1)
        return found


class Ranks:
    """The scheduler processes, each behind a connection that its hooks open; in order of rank."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="eagle3-"))
        self.address = str(self._folder / "ranks")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen(64)
        self._listening.settimeout(_CONNECT_S)
        self._ranks: list[tuple[socket.socket, Any]] = []

    def accept(self, count: int) -> None:
        """Wait for `count` ranks; LookupError when some do not come."""
        found: dict[int, tuple[socket.socket, Any]] = {}
        while len(found) < count:
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                raise LookupError(f"hooks of {len(found)} of {count} SGLang processes came: does this SGLang have "
                                  "--forward-hooks (0.5.8 and later), and run on this machine alone?") from None
            connection.settimeout(_ANSWER_S)
            lines = connection.makefile("r")
            found[json.loads(lines.readline())["rank"]] = connection, lines
        self._ranks = [found[rank] for rank in sorted(found)]
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, **message: Any) -> list[dict[str, Any]]:
        """Send a message to every rank, the first one first; return their answers.

        The results of a batch come from the first rank: the others are given time to run what it has run.
        """
        answers: list[dict[str, Any]] = []
        for connection, lines in self._ranks:
            own = message | ({"wait": answers[0]["passes"]} if answers else {})
            connection.sendall(json.dumps(own).encode() + b"\n")
            line = lines.readline()
            if not line:
                raise ConnectionError("a scheduler process of SGLang is gone")
            answers.append(json.loads(line))
            if "error" in answers[-1]:
                raise RuntimeError(f"rank {len(answers) - 1}: {answers[-1]['error']}")
        return answers


def server_arguments(settings: CaptureSettings, hooks: Sequence[dict[str, Any]]) -> Any:
    """Return SGLang's ServerArgs: the user's engine.args, then what capture needs, in this version's own spelling.

    Raises ValueError for arguments with which hooks would not see the whole stream.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    known = {name for action in parser._actions for name in action.option_strings}
    arguments = prepare_server_args(command_words(settings, hooks, known))
    if not hooks:
        return arguments
    if "--enforce-disable-flashinfer-allreduce-fusion" not in known:  # before 0.5.10
        arguments.enable_flashinfer_allreduce_fusion = False
    if wrong := refused(arguments):
        raise ValueError(f"states cannot be captured from SGLang with {wrong}: leave it out of engine.args")
    return arguments


def command_words(settings: CaptureSettings, hooks: Sequence[dict[str, Any]], known: set[str]) -> list[str]:
    """Return the command line; the last of several counts. `known`: the flags that this version of SGLang has.

    Without hooks: the same engine as it serves by default, but for what shapes its batches.
    """
    words = [*settings.engine_args, "--model-path", settings.model, "--tp-size", str(settings.tensor_parallel_size),
             "--dtype", settings.dtype, *["--trust-remote-code"] * settings.trust_remote_code,
             "--context-length", str(settings.max_length + SPARE_POSITIONS), "--skip-tokenizer-init",
             "--disable-radix-cache", "--chunked-prefill-size", "-1",
             "--max-prefill-tokens", str(settings.batch_tokens + 1)]
    if "--max-total-tokens" not in settings.engine_args:
        words += ["--max-total-tokens", str(2 * settings.batch_tokens + _SPARE_TOKENS)]
    if not hooks:
        return words
    words += ["--disable-overlap-schedule", "--disable-cuda-graph"]
    if "--cuda-graph-backend-prefill" in known:  # 0.5.14 and later
        words += ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"]
    elif "--disable-piecewise-cuda-graph" in known:  # 0.5.10 to 0.5.13
        words.append("--disable-piecewise-cuda-graph")
    if "--enforce-disable-flashinfer-allreduce-fusion" in known:
        words.append("--enforce-disable-flashinfer-allreduce-fusion")
    return [*words, "--forward-hooks", json.dumps(hooks)]


def refused(arguments: Any) -> str:
    """Return the argument of ServerArgs with which a hook would not see every stream, "" when there is none."""
    for name in ("enable_dp_attention", "enable_two_batch_overlap", "speculative_algorithm", "enable_pdmux"):
        if getattr(arguments, name, None):
            return f"{name}={getattr(arguments, name)}"
    for name in ("pp_size", "dp_size", "nnodes"):
        if (getattr(arguments, name, 1) or 1) > 1:
            return f"{name}={getattr(arguments, name)}"
    return ""


def _refuse_beyond_the_model(settings: CaptureSettings) -> None:
    from eagle3.drafter import verifier

    longest = verifier.read(Path(settings.model)).max_positions
    if settings.max_length > longest:
        raise ValueError(f"max_length is {settings.max_length:,}, but the model has {longest:,} positions")
