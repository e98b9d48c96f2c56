"""Time of predicting acceptance: stage 06's walk over replies with a drafter of Kimi-K2.5's size and random weights.

32 replies of 2,048 tokens, whose states are files as the capture leaves them; read, checked, drafted as deep as
--depths says and judged by the verifier's probabilities, all draft-token counts at once. A random drafter is right once
in 32,000 tokens, so whether a draft is right is drawn by lot with --acceptance: 1 is the worst case, in which no
position is ever dropped. With --plain N the way before is timed on N of the replies and scaled: every step at every
position in float32 on the CPU, reply by reply, once for each depth; compared in CPU time, which a busy machine leaves
alone (set OMP_NUM_THREADS=1, so that no thread waits for another).

  python benchmarks/predict_rate.py                                   # a GPU; the target is a minute
  python benchmarks/predict_rate.py --hidden 1024 --heads 16 --ffn 2816 --vocab 32768 --draft-vocab 8192 --replies 4 \\
      --tokens 512 --plain 4                                          # a CPU
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from eagle3.benchmark import prediction, rounds
from eagle3.common import files
from eagle3.drafter.network import _empty_model, layer_shape
from eagle3.drafter.output import Output
from eagle3.drafter.teacher import TeacherHead
from eagle3.drafter.verifier import Verifier
from eagle3.states.store import Sample, StateStore
from eagle3.training import acceptance, drafting, ttt
from eagle3.training.batches import collate

TARGET_S = 60.0
SAMPLING = drafting.Sampling(1.0)


class RandomHead(TeacherHead):
    """The verifier's norm and head with random weights."""

    def __init__(self, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self._norm, self._bias = torch.ones(hidden, device=device), None
        self._head = torch.randn(vocab, hidden, device=device, dtype=dtype).mul_(0.02)
        self._eps, self._how = 1e-5, Output()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=18432)
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="of a reply, its prompt counted")
    parser.add_argument("--prompt", type=int, default=128, help="of these, tokens of the prompt")
    parser.add_argument("--plain", type=int, default=0, help="replies to walk the way before as well, on the CPU")
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 10, 16])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.8, 1.0], help="chance of each draft")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/predict_rate"), help="where states are written")
    parser.add_argument("--keep", action="store_true", help="leave the states there")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    replies = write_replies(given)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    started = time.monotonic()
    model = prediction.on_device(random_model(given, device), device, dtype)
    head = RandomHead(given.hidden, given.vocab, dtype, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    ready = time.monotonic() - started
    print(f"{where}: weights after {ready:.1f} s; {given.replies} replies of {given.tokens} tokens", flush=True)
    slowest = 0.0
    for chance in given.acceptance:
        for depth in given.depths:
            seconds = walked(given, replies, model, head, depth, chance)
            print(f"depth {depth:2}, drafts right with {chance:.2f}: {seconds:.2f} s, "
                  f"{given.replies * given.tokens / seconds:,.0f} tokens/s", flush=True)
            slowest = max(slowest, seconds)
    result: dict[str, Any] = {"seconds": slowest, "device": where}
    if device.type == "cuda":
        result |= {"target_s": TARGET_S, "met": slowest <= TARGET_S}
    if given.plain:
        result["ratio"] = compared(given, replies, model, head)
    if not given.keep:
        shutil.rmtree(given.scratch)
    print(json.dumps(result))
    if not result.get("met", True):
        sys.exit(1)


def walked(given: argparse.Namespace, replies: prediction.Replies, model: Any, head: TeacherHead, depth: int,
           chance: float) -> float:
    """Return the seconds of stage 06's walk over all replies, files read and lengths counted."""
    device = model.fc.weight.device
    lot = torch.Generator(device).manual_seed(0)

    def by_lot(drafted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(drafted), generator=lot, device=device) < chance

    drafting.matches = by_lot
    started = time.monotonic()
    found = prediction.draft_replies(SimpleNamespace(check_stop=lambda: None),  # type: ignore[arg-type]
                                     model, head, replies, {*range(given.replies)}, SAMPLING, depth)
    drafted = [rounds.Drafted(right, chances, given.prompt) for right, chances in found.values()]
    length = rounds.predicted(drafted, min(5, depth), depth)["length"]
    seconds = time.monotonic() - started
    expected = 1 + sum(chance**k for k in range(1, min(5, depth) + 1))
    if abs(length - expected) > 0.3:
        raise SystemExit(f"the walk gave a length of {length:.2f} where the lot gives {expected:.2f}")
    return seconds


def compared(given: argparse.Namespace, replies: prediction.Replies, model: Any, head: TeacherHead) -> dict[str, float]:
    """Return how many times as long the way before takes, for all depths together, by acceptance."""
    device = torch.device("cpu")
    plain = prediction.on_device(model, device, torch.float32)
    seconds = 0.0
    for depth in given.depths:
        started = time.process_time()
        for member in replies.training_samples({*range(given.plain)}):
            batch = collate(replies.store, [member], given.tokens, depth, verify=True, dtype=torch.float32)
            with torch.inference_mode():
                tokens, _ = ttt.draft(plain, batch, depth)
            acceptance.walk_batch(batch, [member], tokens, depth)
        seconds += (time.process_time() - started) * given.replies / given.plain
        print(f"the way before, depth {depth:2}: {seconds:.1f} s so far, scaled to {given.replies} replies", flush=True)
    ratios = {}
    on_cpu = RandomHead(given.hidden, given.vocab, torch.float32, device)
    for chance in given.acceptance:
        started = time.process_time()
        walked(given, replies, plain, on_cpu, max(given.depths), chance)
        ours = time.process_time() - started
        ratios[f"{chance:.2f}"] = seconds / ours
        print(f"all depths, drafts right with {chance:.2f}: {ours:.1f} s on the CPU, the way before took "
              f"{seconds / ours:.1f} times as long", flush=True)
    return ratios


def write_replies(given: argparse.Namespace) -> prediction.Replies:
    """Write random states of all replies as the capture does."""
    from safetensors.torch import save_file

    store = StateStore(given.scratch)
    store.files.mkdir(parents=True, exist_ok=True)
    numbers, samples, checksums = {}, {}, {}
    for k in range(given.replies):
        generator = torch.Generator().manual_seed(k)
        ids = torch.randint(given.vocab, (given.tokens + 1,), generator=generator)
        states = torch.randn(given.tokens + 1, 4, given.hidden, generator=generator, dtype=torch.bfloat16)
        save_file({"hidden_states": states, "token_ids": ids}, store.path(k))
        mask = [0] * given.prompt + [1] * (given.tokens + 1 - given.prompt)
        samples[k] = Sample(k, str(k), "", ids.tolist(), mask)
        numbers[((), tuple(ids.tolist()))] = k
        checksums[k] = files.sha256_file(store.path(k))
    return prediction.Replies(store, numbers, samples, checksums)  # type: ignore[arg-type]


def random_model(given: argparse.Namespace, device: torch.device) -> Any:
    """Return a drafter with random weights on the device."""
    config = {"num_attention_heads": given.heads, "intermediate_size": given.ffn, "rope_theta": 50000.0}
    facts = Verifier(Path("."), "KimiK25ForConditionalGeneration", "kimi_k25", given.hidden, 61, given.vocab, 262144,
                     1e-5, False, True, Output(), config)
    with device:
        model = _empty_model(facts, [2, 30, 58, 60], given.draft_vocab, layer_shape(facts))
    model.d2t = torch.zeros(given.draft_vocab, dtype=torch.int64)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(device)


if __name__ == "__main__":
    main()
