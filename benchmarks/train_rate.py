"""Training speed of a drafter of Kimi-K2.5's size on one GPU or several: tokens/s, time of each part, peak memory.

Weights and states are random: speed does not depend on them. 8,192 packed tokens in documents of 2,048 whose
first part is the prompt; three TTT steps; lm_head trained. Every GPU has a batch of its own (weak scaling): divide
the rate of N by N times that of one.

With --documents N the states are files (118 MB each) that stage 04's own loader reads, checks and moves to the GPU:
what is lost to it is the difference to the first rate.

  python benchmarks/train_rate.py --steps 20
  python benchmarks/train_rate.py --steps 20 --gpus 8 --documents 256 --scratch /mnt/states
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from eagle3.common import files
from eagle3.common.options import TrainSection
from eagle3.drafter.network import _empty_model, layer_shape
from eagle3.drafter.output import Output
from eagle3.drafter.verifier import Verifier
from eagle3.states.encoding import Stored
from eagle3.states.store import StateStore
from eagle3.training import batches
from eagle3.training.trainer import Processes, Trainer

KIMI = {"num_attention_heads": 64, "intermediate_size": 18432, "rope_theta": 50000.0}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes(parser)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trained-head", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU")
    parser.add_argument("--documents", type=int, default=0, help="files of states to train on; 0: one batch in memory")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/train_rate"), help="where these files are written")
    given = parser.parse_args()
    needed = 3 * given.gpus * (given.tokens // given.document)  # two steps fill the queue, the others are timed
    if 0 < given.documents < needed:
        parser.error(f"--documents {given.documents}: at least {needed} for {given.gpus} GPUs")
    if given.gpus > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.gpus)]
        sys.exit(subprocess.run([*command, *sys.argv]).returncode)
    processes = Processes.start()
    measure(given, processes)
    processes.stop()


def sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained: Kimi-K2.5's drafter on packed documents by default."""
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=8192, help="positions in a batch")
    parser.add_argument("--document", type=int, default=2048, help="positions of a document")
    parser.add_argument("--prompt", type=int, default=0, help="of these, positions without loss")
    parser.add_argument("--ttt-steps", type=int, default=3)


def measure(given: argparse.Namespace, processes: Processes) -> None:
    """Time optimizer steps; the first process prints what all of them do together."""
    started = time.monotonic()
    model = random_model(given, processes.device)
    options = TrainSection(batch_tokens=given.tokens, ttt_steps=given.ttt_steps, draft_tokens=given.ttt_steps)
    trainer = Trainer(model, StateStore(given.scratch), options, processes)
    print(f"ready after {time.monotonic() - started:.1f} s: {sum(p.numel() for p in model.parameters()) / 1e6:,.0f} M "
          f"parameters, {sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:,.0f} M trained")
    batch = random_batch(given, processes.device)
    total = batch.supervised * processes.world
    first = timed(lambda: trainer.step([batch], total, 1e-5))
    whole = timed(lambda: trainer.step([batch], total, 1e-5), given.steps)
    parts = zip(*(parts_of(trainer, batch, total) for _ in range(given.steps)), strict=True)
    rates = (processes.world * tokens / whole for tokens in (given.tokens, batch.supervised))
    if processes.rank == 0:
        print(f"first step {first:.2f} s; then {1000 * whole:.0f} ms a step; waiting for each part, " + ", ".join(
            f"{name} {1000 * sum(part) / given.steps:.0f} ms"
            for name, part in zip(("forward", "backward", "optimizer"), parts, strict=True)))
        print("{:,.0f} tokens/s, {:,.0f} supervised tokens/s, ".format(*rates) + f"peak memory "
              f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB, {processes.world} x {torch.cuda.get_device_name()}, "
              f"torch {torch.__version__}", flush=True)
    if given.documents:
        del batch
        from_disk(given, trainer, processes)


def from_disk(given: argparse.Namespace, trainer: Trainer, processes: Processes) -> None:
    """Time epochs over files, checksums in the first."""
    if processes.rank == 0:
        write_states(given)
    samples = processes.from_first([batches.TrainingSample(i, sha256, mask_of(given))
                                    for i, sha256 in enumerate(checksums(given))] if processes.rank == 0 else None)
    size, world = given.tokens // given.document, processes.world
    packed = [samples[k : k + size] for k in range(0, len(samples) - size + 1, size)]
    steps = [packed[k : k + world] for k in range(0, len(packed) - world + 1, world)]
    for epoch in range(3):
        loader = trainer.loader(trainer.mine(steps))
        stream, times = iter(loader), [time.monotonic()]
        for members in steps:
            supervised = sum(sum(int(sample.supervised().sum()) for sample in batch) for batch in members)
            trainer.step([next(stream)], supervised, 1e-5)
            times.append(_now())
        loader.close()
        if processes.rank == 0:
            spent = (times[-1] - times[2]) / (len(steps) - 2)
            print(f"epoch {epoch + 1} from files: {1000 * spent:.0f} ms a step, "
                  f"{processes.world * given.tokens / spent:,.0f} tokens/s", flush=True)


def write_states(given: argparse.Namespace) -> None:
    """Write the same random states into as many files as asked for."""
    from safetensors.torch import save

    store = StateStore(given.scratch)
    store.files.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(given.document + 1, 4, given.hidden, generator=generator).to(torch.bfloat16)
    data = save({"hidden_states": states, "token_ids": torch.randint(163840, (given.document + 1,))})
    for number in range(given.documents):
        store.path(number).write_bytes(data)


def checksums(given: argparse.Namespace) -> list[str]:
    """Return the checksum of each file."""
    return [files.sha256_file(StateStore(given.scratch).path(0))] * given.documents


def mask_of(given: argparse.Namespace) -> Any:
    """Return the loss mask of a document."""
    import numpy as np

    return np.arange(given.document + 1) >= given.prompt


def random_model(given: argparse.Namespace, device: torch.device) -> Any:
    """Return a drafter with random weights on the device."""
    facts = Verifier(Path("."), "KimiK25ForConditionalGeneration", "kimi_k25", given.hidden, 61, 163840, 262144, 1e-5,
                     False, True, Output(), KIMI)
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
        def read(self, number: int, sha256: str | None = None, pin: bool = False) -> Stored:
            generator = torch.Generator().manual_seed(number)
            # of long documents a part again and again: numbers by the billion take a CPU half a minute
            part = torch.randn(min(given.document + 1, 2049), 4, given.hidden, generator=generator,
                               dtype=torch.bfloat16)
            states = part.repeat(-(-(given.document + 1) // len(part)), 1, 1)[: given.document + 1]
            return Stored(states, None, torch.randint(163840, (given.document + 1,), generator=generator))

    members = [batches.TrainingSample(i, "", mask_of(given)) for i in range(given.tokens // given.document)]
    return batches.collate(Store(), members, given.tokens, given.ttt_steps, False, device)  # type: ignore[arg-type]


def timed(act: Callable[[], Any], times: int = 1) -> float:
    """Return the mean seconds of what is done `times` times, three of them done before."""
    for _ in range(3 if times > 1 else 0):
        act()
    started = _now()
    for _ in range(times):
        act()
    return (_now() - started) / times


def parts_of(trainer: Trainer, batch: batches.Batch, total: int) -> tuple[float, float, float]:
    """Do one optimizer step; return seconds of forward, backward and optimizer, each waited for."""
    trainer.optimizer.zero_grad(set_to_none=True)
    times = [_now()]
    loss = trainer._losses(batch, last=True).sum() / total
    times.append(_now())
    (loss * trainer.processes.world).backward()
    times.append(_now())
    trainer._update(loss.detach(), math.inf)
    times.append(_now())
    forward, backward, optimizer = (b - a for a, b in zip(times, times[1:], strict=False))
    return forward, backward, optimizer


def _now() -> float:
    torch.cuda.synchronize()
    return time.monotonic()


if __name__ == "__main__":
    main()
