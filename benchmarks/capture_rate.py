"""Tokens/s of stage 02's capture beside the plain prefill of the same engine, in turn, on the same batches.

Two engines are loaded side by side: one as vLLM runs by default (compiled, with CUDA graphs where it uses them for
prefill), one as stage 02 starts it. Both get the same batches of random tokens, `--pairs` times, in turn. The captured
states are written, hashed and synced; what lies in --dir afterwards is removed. Prints the median of the pairs' ratios.

  python benchmarks/capture_rate.py --build llama-7b --dir /dev/shm                       # a GPU of 80 GB
  python benchmarks/capture_rate.py --build moe-mla --dir /dev/shm                        # Kimi-K2.5's kind of layers
  python benchmarks/capture_rate.py --build smollm2 --samples 4000 --length 176 --dir /dev/shm
  python benchmarks/capture_rate.py --model models/smollm2-135m --samples 24 --length 256 --batch-tokens 1024   # CPUs
  python benchmarks/capture_rate.py --engine sglang --engine-python /opt/sglang/bin/python --build llama-7b

With SGLang the plain engine has its graphs and overlapped scheduling, but as the capture no radix cache and no chunks.

--build makes a model of random weights in --dir first. Several of these can load side by side: with --turn each waits
for its turn before it times. Prints a JSON line at its end and exits
with 1 when the ratio is below --target.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from random_models import SIZES, build  # noqa: E402
from support.captures import stage_at  # noqa: E402

from eagle3.common.options import EngineOptions, ModelOptions  # noqa: E402
from eagle3.common.processes import Child  # noqa: E402
from eagle3.drafter import verifier  # noqa: E402
from eagle3.states.extraction import Capture, batches, engine_environment, settings_for  # noqa: E402
from eagle3.states.settings import CaptureSettings  # noqa: E402
from eagle3.states.store import Sample, StateStore  # noqa: E402


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a verifier")
    parser.add_argument("--build", choices=SIZES, help="make one of random weights instead")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang"))
    parser.add_argument("--engine-python", help="interpreter that holds it; default: this one")
    parser.add_argument("--engine-args", default="", help="more arguments, for both")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--length", type=int, default=1000, help="mean tokens of a sample; 80%% to 120%% of it")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--states-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--capture", default="auto", choices=("auto", "outputs", "hooks"))
    parser.add_argument("--eager", action="store_true", help="compare with eager prefill")
    parser.add_argument("--share", type=float, default=0.4, help="of the device's memory, for each engine")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for states and built models")
    parser.add_argument("--turn", type=Path, help="a file: time only while holding a lock on it")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain:
        serve_plain(CaptureSettings.from_json(given.plain), eager=given.eager)
        return 0
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        figures = measure(given, Path(folder))
    print(json.dumps(figures))
    return int(figures["ratio"] < given.target)


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return rates of both and the median ratio of the pairs."""
    model = build(folder / "model", given.build) if given.build else given.model
    facts, store = verifier.read(model), StateStore(folder / "states")
    share = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}[given.engine]
    engine = EngineOptions(kind=given.engine, python=given.engine_python, args=[
        "--skip-tokenizer-init", share, str(given.share), *shlex.split(given.engine_args)])
    longest = max(int(given.length * 1.2) + 1, 2)
    settings = settings_for(facts, facts.layers([]), ModelOptions(path=str(model)), engine, backend=given.engine,
                            dtype="bfloat16", max_length=longest, batch_tokens=given.batch_tokens,
                            states_dtype=given.states_dtype, capture=given.capture, compiled=not given.eager)
    rng = random.Random(0)
    samples = [Sample(i, str(i), "", [rng.randrange(5, facts.vocab_size) for _ in range(
        rng.randrange(int(given.length * 0.8), longest - 1))], []) for i in range(given.samples)]
    work = list(batches(samples, settings.batch_tokens))
    tokens = sum(len(sample.input_ids) for sample in samples)
    # One after the other: an engine that loads measures how much memory is left beside it.
    plain = Plain(settings, engine, folder / "plain.log", eager=given.eager)
    with Capture(stage_at(folder, store), engine, store, settings) as child, turn(given.turn):
        sides: dict[str, Callable[[], object]] = {
            "plain": lambda: plain.run(work),
            "capture": lambda: [None for _ in child.run_all((batch, None) for batch in work)]}
        times: dict[str, list[float]] = {name: [] for name in sides}
        cores: dict[str, float] = {}
        for number in range(given.pairs + 1):  # the first pair warms up
            for name in (sides if number % 2 else reversed(sides)):
                before, busy = time.monotonic(), os.times()
                sides[name]()
                seconds, now = time.monotonic() - before, os.times()
                if number:
                    times[name].append(seconds)
                    cores[name] = (now.user + now.system - busy.user - busy.system) / seconds
                print(f"{name}: {tokens / seconds:,.0f} tokens/s, {len(samples) / seconds:,.0f} samples/s", flush=True)
        how = child.how
    plain.stop()
    ratios = [p / c for p, c in zip(times["plain"], times["capture"], strict=True)]
    written = sum(path.stat().st_size for path in store.files.iterdir())
    return {"model": given.build or model.name, "how": how, "states": given.states_dtype,
            "ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
            **{f"{name}_tokens_s": round(tokens / statistics.median(found)) for name, found in times.items()},
            "samples_s": round(len(samples) / statistics.median(times["capture"])),
            "gb_s": round(written / 1e9 / statistics.median(times["capture"]), 3),
            "cores_of_the_stage": round(cores["capture"], 2), "bytes": written, "tokens": tokens}


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Hold the lock on a file, waiting for it; no file: nothing to wait for."""
    print("loaded", flush=True)
    if not path:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Plain:
    """The engine as it runs by default, in a child."""

    def __init__(self, settings: CaptureSettings, engine: EngineOptions, log: Path, *, eager: bool) -> None:
        command = [engine.python or sys.executable, __file__, "--plain", settings.to_json(), *["--eager"] * eager]
        self._child = Child(command, log_path=log, env=engine_environment(engine), piped=True)
        self._answer()

    def run(self, work: list[list[Sample]]) -> None:
        """Prefill all batches."""
        jobs = [[sample.input_ids for sample in batch] for batch in work]
        self._child.stdin.write(json.dumps(jobs).encode() + b"\n")
        self._child.stdin.flush()
        self._answer()

    def stop(self) -> None:
        """End it."""
        self._child.stop()

    def _answer(self) -> None:
        if not self._child.stdout.readline():
            raise RuntimeError("the plain engine ended:\n" + self._child.tail(30))


def serve_plain(settings: CaptureSettings, *, eager: bool) -> None:
    """Load the engine without anything of ours in it; run the batches of each line of stdin and answer with a line."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prefill = plain_sglang(settings) if settings.backend == "sglang" else plain_vllm(settings, eager=eager)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        for batch in json.loads(line):
            prefill(batch)
        print("done", file=replies, flush=True)


def plain_sglang(settings: CaptureSettings) -> Callable[[list[list[int]]], object]:
    """Load SGLang; return what prefills a batch."""
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    from sglang.srt.entrypoints.engine import Engine

    from eagle3.states import sglang_side

    engine = Engine(server_args=sglang_side.server_arguments(settings, ()))
    return lambda batch: engine.generate(input_ids=batch, sampling_params={"max_new_tokens": 1, "temperature": 0.0})


def plain_vllm(settings: CaptureSettings, *, eager: bool) -> Callable[[list[list[int]]], object]:
    """Load vLLM; return what prefills a batch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # batches as the capture has them
    from vllm import LLM, SamplingParams

    from eagle3.states import engine_side

    arguments = engine_side.engine_arguments(dataclasses.replace(settings, capture="outputs"))
    arguments = {name: value for name, value in arguments.items() if name not in ("worker_cls", "additional_config")}
    llm = LLM(**arguments | ({"enforce_eager": True} if eager else {}))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    return lambda batch: llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)


if __name__ == "__main__":
    sys.exit(main())
