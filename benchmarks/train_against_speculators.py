"""Training rate beside speculators' own step, and beside the matrix products that any step of this drafter has to do.

A drafter of Kimi-K2.5's size with random weights, 8,192 packed tokens, three TTT steps, one GPU, all in one run:
speculators' model compiled, in bf16 with bf16 moments and a frozen head, as its trainer steps (its loss in the plain
form); ours in float32 with float32 moments, nothing compiled, with a frozen head and with a trained one; and the bare
products of the step, in bf16. Ours is measured before and after, the mean is taken: a card grows warm. Both sides find
their batch on the GPU; what the peer's trainer takes to copy one, which ours does meanwhile, is said too.

  python benchmarks/train_against_speculators.py --steps 20
  python benchmarks/train_against_speculators.py --steps 20 --prompt 512      # a quarter of each text is prompt

Prints a JSON line at its end and exits with 1 when ours with a frozen head is below 1.15 of the peer.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from train_rate import mask_of, random_batch, random_model, sizes, timed

from eagle3.common.options import TrainSection
from eagle3.states.store import StateStore
from eagle3.training.batches import Batch
from eagle3.training.trainer import Processes, Trainer

TARGET = 1.15


def main() -> int:
    """Measure both sides, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes(parser)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, of each kind")
    parser.add_argument("--no-peer", action="store_true", help="leave speculators out, which compiles for a minute")
    given = parser.parse_args()
    processes = Processes.start()
    measured: dict[str, dict[str, float]] = {}
    for name, measure in plan(given, processes):
        with cleared():
            figures = measure()
        measured[name] = figures
        rate = given.tokens / figures["seconds"]
        print(f"{name}: {1000 * figures['seconds']:.1f} ms, {rate:,.0f} tokens/s, peak {figures['peak_gb']:.1f} GB, "
              f"first step after {figures['first']:.1f} s", flush=True)
    result = summary(given, measured)
    print(json.dumps(result))
    return int(result.get("over_peer", TARGET) < TARGET)


def plan(given: argparse.Namespace, processes: Processes) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Yield what is measured, by name, in order."""
    for turn in ("", ", again"):
        yield "ours, frozen head" + turn, lambda: ours(given, processes, trained_head=False)[0]
        yield "ours, trained head" + turn, lambda: ours(given, processes, trained_head=True)[0]
        if not turn:
            yield "products, trained head", lambda: products(given, processes, trained_head=True)
            if not given.no_peer:
                yield "speculators, frozen head", lambda: peer(given, processes)


def summary(given: argparse.Namespace, measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return rates in tokens/s and their ratios."""
    def rate(name: str) -> float:
        seconds = [figures["seconds"] for key, figures in measured.items() if key.startswith(name)]
        return given.tokens * len(seconds) / sum(seconds)

    frozen, trained, bare = rate("ours, frozen"), rate("ours, trained"), rate("products")
    result = {"frozen": round(frozen), "trained": round(trained), "products": round(bare),
              "of_products": round(trained / bare, 3), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if not given.no_peer:
        figures = measured["speculators, frozen head"]
        with_copy = given.tokens / (figures["seconds"] + figures["copy"])
        result |= {"peer": round(rate("speculators")), "peer_with_copy": round(with_copy),
                   "over_peer": round(frozen / rate("speculators"), 3),
                   "over_peer_with_copy": round(frozen / with_copy, 3)}
    return result


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Begin and end with an empty GPU, and count its memory from there."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def timings(act: Callable[[], Any], started: float, steps: int) -> dict[str, float]:
    """Return seconds to the end of the first step, of a later one, and peak memory."""
    act()
    torch.cuda.synchronize()
    first = time.monotonic() - started
    return {"first": first, "seconds": timed(act, steps), "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def ours(given: argparse.Namespace, processes: Processes, *, trained_head: bool, options: TrainSection | None = None
         ) -> tuple[dict[str, float], Trainer]:
    """Time the trainer's steps; return the times, and the trainer."""
    given.trained_head = trained_head
    model, batch = random_model(given, processes.device), random_batch(given, processes.device)
    options = options or TrainSection(batch_tokens=given.tokens, ttt_steps=given.ttt_steps,
                                      draft_tokens=given.ttt_steps)
    started = time.monotonic()
    trainer = Trainer(model, StateStore(Path("/nowhere")), options, processes)
    return timings(lambda: trainer.step([batch], batch.supervised, 1e-5), started, given.steps), trainer


def products(given: argparse.Namespace, processes: Processes, *, trained_head: bool) -> dict[str, float]:
    """Time a step's matrix products alone, each into memory of its own shape: forward and both of the backward."""
    given.trained_head = trained_head
    model, batch = random_model(given, processes.device), random_batch(given, processes.device)
    own, mlp, rows = model.layers[0].self_attn, model.layers[0].mlp, len(batch.rows)
    layer = (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj, model.lm_head)
    used = {module: (module.weight.detach().bfloat16(), random(rows, module.weight.shape[1]),
                     random(rows, len(module.weight))) for module in (*layer, model.fc)}

    def act() -> None:
        torch.mm(used[model.lm_head][1], used[model.lm_head][0].T)  # the teacher's logits
        for module in (model.fc, *layer * given.ttt_steps):
            weight, x, gradient = used[module]
            torch.mm(x, weight.T)
            if module is not model.fc:
                torch.mm(gradient, weight)
            if module.weight.requires_grad:
                torch.mm(gradient.T, x)

    return timings(act, time.monotonic(), given.steps)


def peer(given: argparse.Namespace, processes: Processes) -> dict[str, float]:
    """Time speculators' model in the steps of its trainer, which copies a batch before each."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.optimizers import build_optimizers

    given.trained_head = False
    source = random_model(given, processes.device)
    source.config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    with processes.device:
        model = Eagle3DraftModel(source.config)
    model.load_state_dict(source.state_dict(), strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(source.get_parameter(name).requires_grad)
    model.to(processes.device, torch.bfloat16).train()
    inputs = peer_batch(given, random_batch(given, processes.device))
    options = argparse.Namespace(optimizer="adamw", lr=1e-5, weight_decay=0.01)
    (optimizer,) = build_optimizers(model, options)
    loss_config = resolve_loss_config("kl_div", "eager")
    del source

    def act() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs, ttt_steps=given.ttt_steps, loss_config=loss_config)[1]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    pinned = [tensor.cpu().pin_memory() for tensor in inputs.values()]
    figures = timings(act, time.monotonic(), given.steps)
    return figures | {"copy": timed(lambda: [tensor.cuda(non_blocking=True) for tensor in pinned], 5)}


def peer_batch(given: argparse.Namespace, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the inputs of speculators' forward for our batch: teacher states and mask at every position."""
    count = given.tokens // given.document
    teacher = torch.zeros(len(batch.ids), given.hidden, dtype=batch.teacher.dtype, device=batch.ids.device)
    teacher[batch.mask] = batch.teacher
    mask = torch.from_numpy(mask_of(given)[1:]).to(batch.ids.device).repeat(count)
    documents = torch.arange(count, device=batch.ids.device).repeat_interleave(given.document)
    tensors = {"hidden_states": batch.aux, "input_ids": batch.ids, "document_ids": documents, "loss_mask": mask,
               "position_ids": batch.positions, "verifier_last_hidden_states": teacher}
    return {name: tensor[None] for name, tensor in tensors.items()}


def random(*shape: int) -> torch.Tensor:
    """Return a random tensor in bf16 on the GPU."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
