"""Start an engine as a server, wait until it serves the right model, stop it again."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle3.common.errors import PreconditionError
from eagle3.common.log import duration, logger
from eagle3.common.options import EngineOptions
from eagle3.common.processes import Child
from eagle3.common.stage import Stage
from eagle3.engines import arguments, defaults, installed, stall
from eagle3.engines.servers import NO_ANSWER, Server, ended, get, identify

_POLL_S = 0.25
_ECHO_EVERY_S = 30.0


def command(
    engine: EngineOptions, model_path: Path, port: int, extra_args: Sequence[str] = (),
    speculative: dict | None = None, *, for_cpu: bool = True,
) -> list[str]:
    """Return the command line of a server on 127.0.0.1.

    Args:
        speculative: {"model": drafter folder, "num_speculative_tokens": K}, K draft tokens in a chain.
        for_cpu: look whether the engine runs on a CPU here, and add what that needs.
    """
    shared = ["--host", "127.0.0.1", "--port", str(port)]
    if engine.kind == "vllm":
        line = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path), *shared]
        line += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
        line += [*(defaults.cpu_args(engine, model_path) if for_cpu else []), *engine.args, *extra_args]
        if speculative:
            line += ["--speculative-config", json.dumps({"method": "eagle3"} | speculative)]
    else:
        line = ["-m", "sglang.launch_server", "--model-path", str(model_path), *shared, "--enable-metrics"]
        line += ["--tp-size", str(engine.tensor_parallel_size), *engine.args, *extra_args]
        if speculative:
            steps = int(speculative["num_speculative_tokens"])
            line += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(speculative["model"])]
            line += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"]
            line += ["--speculative-num-draft-tokens", str(steps + 1)]
    return [installed.interpreter(engine), *line]


@contextlib.contextmanager
def serve(
    engine: EngineOptions,
    model_path: Path,
    *,
    stage: Stage,
    label: str,
    extra_args: Sequence[str] = (),
    speculative: dict | None = None,
) -> Iterator[Server]:
    """Start a server, yield it once it serves this model, and stop its process group afterwards.

    Its output goes to logs/<label>-server.log of the run. The port is a free one unless the engine's
    arguments name one. Should this process die, the kernel closes the child's lifeline and the group ends.

    Raises:
        PreconditionError: no engine, port in use, the child ended (with the end of its log), another model
            answers, it stands still (`stall`), or the start-up time is over. Interrupted: a signal came while waiting.
    """
    installed.check(engine)
    port = given_port([*engine.args, *extra_args]) or _free_port()
    _require_free(port)
    log_path = stage.run_dir / "logs" / f"{label}-server.log"
    line = command(engine, model_path, port, extra_args, speculative)
    logger.info("starting %s for %s; its log: %s", engine.kind, label, log_path)
    logger.debug("engine command: %s", " ".join(line))
    started = time.monotonic()
    on_cpu = defaults.one_process_on_cpu(engine) | defaults.mla_on_cpu_env(engine, model_path)
    with Child(line, log_path=log_path, env=on_cpu | defaults.default_env(engine)) as child:
        server = _wait_until_ready(engine, model_path, f"http://127.0.0.1:{port}", child, stage)
        logger.info("%s %s is ready after %s", server.kind, server.version, duration(time.monotonic() - started))
        yield server


def _wait_until_ready(engine: EngineOptions, model_path: Path, root: str, child: Child, stage: Stage) -> Server:
    started = last_echo = time.monotonic()
    watch = stall.Watch(engine, child)
    while True:
        stage.check_stop()
        if child.poll() is not None:
            raise ended(child, "the engine ended while starting")
        with contextlib.suppress(*NO_ANSWER):
            if engine.kind == "vllm":
                get(f"{root}/health")
            server = identify(root, model_path, child)
            if child.poll() is None:  # else it was another server that answered
                return server
        now = time.monotonic()
        if now - started > engine.startup_timeout_min * 60:
            raise PreconditionError(
                f"the engine did not answer within {engine.startup_timeout_min:g} minutes",
                where=child.log_path,
                found=child.tail(),
                fix="raise --engine-startup-timeout-min if it was still loading",
            )
        watch.check()
        if now - last_echo >= _ECHO_EVERY_S:
            last_echo = now
            logger.info("waiting for the engine (%s): %s", duration(now - started), child.tail(1)[-200:])
        time.sleep(_POLL_S)


def given_port(words: Sequence[str]) -> int | None:
    """Return the port that an engine's arguments name, None when they leave it to us."""
    value = arguments.value(words, "--port") or ""
    return int(value) if value.isdigit() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return
        except OSError as error:
            found: object = error
    with contextlib.suppress(*NO_ANSWER):
        models = json.loads(get(f"http://127.0.0.1:{port}/v1/models"))["data"]
        found = "a server of " + ", ".join(str(model["id"]) for model in models)
    raise PreconditionError(
        "the port is in use by another program; it was left alone",
        where=f"127.0.0.1:{port}",
        found=found,
        fix="leave --port out of the engine's arguments, or attach to that server",
    )
