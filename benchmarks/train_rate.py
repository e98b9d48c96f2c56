"""Training speed of a drafter of Kimi-K2.5's size on one GPU or several: tokens/s, time of each part, peak memory.

Weights and states are random: speed does not depend on them. 8,192 packed tokens in documents of 2,048 whose
first part is the prompt; three TTT steps; lm_head trained. Every GPU has a batch of its own (weak scaling): divide
the rate of N by N times that of one.

  python benchmarks/train_rate.py --steps 20
  python benchmarks/train_rate.py --steps 20 --gpus 8
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from eagle3 import batches
from eagle3.drafter import _empty_model, layer_shape
from eagle3.options import TrainSection
from eagle3.training import Objective, Processes, clip, make_optimizer, shard
from eagle3.verifier import Verifier

KIMI = {"num_attention_heads": 64, "intermediate_size": 18432, "rope_theta": 50000.0}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=8192, help="positions in a batch")
    parser.add_argument("--document", type=int, default=2048, help="positions of a document")
    parser.add_argument("--prompt", type=int, default=0, help="of these, positions without loss")
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trained-head", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU")
    given = parser.parse_args()
    if given.gpus > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.gpus)]
        sys.exit(subprocess.run([*command, *sys.argv]).returncode)
    processes = Processes.start()
    measure(given, processes)
    processes.stop()


def measure(given: argparse.Namespace, processes: Processes) -> None:
    """Time optimizer steps; the first process prints what all of them do together."""
    device, world = processes.device, processes.world
    started = time.monotonic()
    model = random_model(given, device)
    objective = Objective(model)
    if world > 1:
        shard(objective, torch.bfloat16)
    optimizer = make_optimizer(model, TrainSection())
    batch = random_batch(given, device)
    print(f"ready after {time.monotonic() - started:.1f} s: {sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M "
          f"parameters, {sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:,.0f} M trained")
    figures = [step(objective, optimizer, batch, given.ttt_steps) for _ in range(given.steps + 2)]
    if processes.rank > 0:
        return
    print(f"first step {figures[0][-1]:.2f} s")
    names = ("forward", "backward", "optimizer", "whole step")
    means = [1000 * sum(column) / given.steps for column in zip(*figures[2:], strict=True)]
    print(", ".join(f"{name} {mean:.0f} ms" for name, mean in zip(names, means, strict=True)))
    rates = (1000 * world * tokens / means[-1] for tokens in (given.tokens, batch.supervised))
    print("{:,.0f} tokens/s, {:,.0f} supervised tokens/s, ".format(*rates) + f"peak memory "
          f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB, {world} x {torch.cuda.get_device_name()}, torch "
          f"{torch.__version__}")


def random_model(given: argparse.Namespace, device: torch.device) -> Any:
    """Return a drafter with random weights on the device."""
    facts = Verifier(Path("."), "KimiK25ForConditionalGeneration", "kimi_k25", given.hidden, 61, 163840, 262144, 1e-5,
                     False, True, KIMI)
    with device:
        model = _empty_model(facts, [2, 30, 58, 60], given.draft_vocab, layer_shape(facts))
    model = model.to(device)
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("embed_tokens", "verifier_")) or (name == "lm_head.weight" and not given.trained_head)
        parameter.requires_grad_(not frozen)
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def random_batch(given: argparse.Namespace, device: torch.device) -> batches.Batch:
    """Return a packed batch of random states."""

    class Store:
        def load(self, number: int, sha256: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(number)
            states = torch.randn(given.document + 1, 4, given.hidden, generator=generator, dtype=torch.bfloat16)
            return states, torch.randint(163840, (given.document + 1,), generator=generator)

    import numpy as np

    mask = np.arange(given.document + 1) >= given.prompt
    members = [batches.TrainingSample(i, "", mask) for i in range(given.tokens // given.document)]
    batch = batches.collate(Store(), members, given.tokens, given.ttt_steps, verify=False)  # type: ignore[arg-type]
    return batch.to(device, torch.bfloat16)


def step(
    objective: Objective, optimizer: torch.optim.Optimizer, batch: batches.Batch, ttt_steps: int
) -> tuple[float, ...]:
    """Do one optimizer step; return seconds of forward, backward, optimizer, and all."""
    from speculators.losses import resolve_loss_config

    times = [_now()]
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = objective(batch, ttt_steps, resolve_loss_config("kl_div", "eager")).sum() / batch.supervised
    times.append(_now())
    loss.backward()
    times.append(_now())
    clip((p for p in objective.parameters() if p.requires_grad), 1.0)
    optimizer.step()
    times.append(_now())
    return (*(b - a for a, b in zip(times, times[1:], strict=False)), times[-1] - times[0])


def _now() -> float:
    torch.cuda.synchronize()
    return time.monotonic()


if __name__ == "__main__":
    main()
