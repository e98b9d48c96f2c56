"""Training a drafter: optimizer step, validation, processes.

The loss of a step is the mean over all its supervised positions, whatever batch or process they are in, so
one process with accumulation 2 and two processes compute the same step. Several processes share weights,
gradients and optimizer state: each holds its rows of every matrix (FSDP2).
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from eagle3.common import workers
from eagle3.common.errors import StageError
from eagle3.common.options import TrainSection
from eagle3.states.store import StateStore
from eagle3.training import acceptance, losses, ttt
from eagle3.training.batches import Batch, Prefetcher, TrainingSample, collate, pack
from eagle3.training.checkpoints import trainable
from eagle3.training.optimizer import FusedAdamW, make_optimizer
from eagle3.training.sharding import Objective, clip, gradient_norms, shard, vectors

_READERS = 8  # files read and checked at once, in each process
# How long processes wait for each other; torch's 10 minutes on GPUs are less than a checkpoint on a slow disk may take.
PATIENCE = timedelta(hours=1)


@dataclass(frozen=True)
class Processes:
    """This process among its peers; a single process needs no group."""

    rank: int
    world: int
    device: torch.device

    @staticmethod
    def start() -> "Processes":
        """Join the group (NCCL on GPUs, gloo on CPUs), if this process is one of several."""
        world, rank = workers.world(), workers.rank()
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", workers.local_rank()) if gpu else torch.device("cpu")
        if gpu:
            torch.cuda.set_device(device)
        if world > 1:
            # Workers meet in a file and so need no port; torchrun has a store of its own.
            store = dist.FileStore(str(workers.FOLDER / "store"), world) if workers.FOLDER else None
            if store is not None:
                store.set_timeout(PATIENCE)  # a process may start late, from a slow disk
            dist.init_process_group("nccl" if gpu else "gloo", timeout=PATIENCE, store=store, rank=rank,
                                    world_size=world)
        return Processes(rank, world, device)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Say whether any process says so (all stop at the same step)."""
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item() > 0) if self.world > 1 else flag

    def from_first(self, value: Any) -> Any:
        """Return what the first process has for it."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def stop(self) -> None:
        """Leave the group."""
        if self.world > 1:
            dist.destroy_process_group()


class Trainer:
    """Runs optimizer steps and validation on one process of the group."""

    def __init__(self, model: Any, store: StateStore, options: TrainSection, processes: Processes) -> None:
        self.model, self.store, self.options, self.processes = model, store, options, processes
        self._loss = losses.of(options.loss), options.ttt_step_loss_decay
        bf16 = options.dtype == "bfloat16" or (options.dtype == "auto" and processes.device.type == "cuda")
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self._autocast = torch.autocast(processes.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        self._objective = Objective(model)
        for parameter in model.parameters():
            if not parameter.requires_grad:  # the verifier's, which has them in no more than bfloat16
                parameter.data = parameter.data.to(self._dtype)
        if processes.world > 1:
            shard(self._objective, self._dtype)
        self.optimizer = make_optimizer(model, options, fused=ttt.fused_on(processes.device))
        self._verified: set[int] = set()
        self._stream = torch.cuda.Stream(processes.device) if processes.device.type == "cuda" else None
        self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "reader")

    def load_batch(self, members: list[TrainingSample]) -> Batch:
        """Load a batch to the device; each file's checksum is checked the first time it is read."""
        fresh = any(sample.i not in self._verified for sample in members)
        steps = max(self.options.ttt_steps, self.options.draft_tokens)
        with self._beside_training():
            batch = collate(self.store, members, self.options.batch_tokens, steps, fresh, self.processes.device,
                            self._dtype, self._readers)
        self._verified.update(sample.i for sample in members)
        return batch

    @contextlib.contextmanager
    def _beside_training(self) -> Iterator[None]:
        """Do what follows on the GPU in the stream for loading, and wait for it. One stream: each has memory of its own
        that no other can use."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self.processes.device)  # each thread has a current one
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def loader(self, batches: list[list[TrainingSample] | None]) -> Prefetcher:
        """Return a prefetcher over batches (None stays None)."""
        return Prefetcher(batches, lambda members: None if members is None else self.load_batch(members))

    def mine(self, steps: list[list[list[TrainingSample]]]) -> list[list[TrainingSample] | None]:
        """Return this process's batches of the given steps, None where it has none."""
        return [step[rank] if rank < len(step) else None for step in steps for rank in self._my_slots()]

    def _my_slots(self) -> range:
        per_step = self.options.accumulation * self.processes.world
        return range(self.processes.rank, per_step, self.processes.world)

    def step(self, batches: list[Batch | None], total_supervised: int, rate: float) -> dict[str, float]:
        """Do one optimizer step and return loss, grad_norm and lr.

        Raises StageError (a bug or broken data) before the weights are touched when the loss is not finite.
        """
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        device = self.processes.device
        loss_sum = torch.zeros((), device=device)
        for number, batch in enumerate(batches):
            if batch is not None and batch.supervised == 0:
                batch = None
            if batch is None and self.processes.world == 1:
                continue
            loss = self._losses(batch, last=number == len(batches) - 1).sum() / max(1, total_supervised)
            (loss * self.processes.world).backward()  # the mean over the processes is taken of what each has
            loss_sum += loss.detach()
        if self.processes.world > 1:  # FSDP has done so with the matrices
            for parameter in vectors(self._objective):
                if parameter.grad is not None:
                    self.processes.sum(parameter.grad).div_(self.processes.world)
        loss_value, norm = self._update(self.processes.sum(loss_sum))
        if not math.isfinite(loss_value) or not math.isfinite(norm):
            raise StageError("the loss is not finite", found=f"loss {loss_value}, gradient norm {norm}",
                             fix="lower --lr and run the same command again: add --out to keep this result")
        return {"loss": loss_value, "grad_norm": norm, "lr": rate}

    def _update(self, loss_sum: torch.Tensor) -> tuple[float, float]:
        """Clip gradients and take them into the weights, unless loss or norm is not finite; return the two."""
        largest = self.options.max_grad_norm or math.inf
        parameters = [*trainable(self.model).values()]
        norms = gradient_norms(parameters)
        if isinstance(self.optimizer, FusedAdamW):
            return self.optimizer.clipped_step(loss_sum, norms, largest)
        loss, norm = float(loss_sum), math.hypot(*map(float, norms))
        if math.isfinite(loss) and math.isfinite(norm):
            clip(parameters, norm, largest)
            self.optimizer.step()
        return loss, norm

    def _losses(self, batch: Batch | None, last: bool) -> torch.Tensor:
        """Return the losses of a batch; gradients are summed up here until the last of a step."""
        if isinstance(self._objective, FSDPModule):
            self._objective.set_requires_gradient_sync(last)
        with self._autocast:
            return self._objective(batch and batch.used_here(), self.options.ttt_steps, *self._loss)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Have the whole weights in this process: how many batches each evaluates is its own affair then."""
        if not isinstance(self._objective, FSDPModule):
            yield
            return
        self._objective.unshard()
        yield
        self._objective.reshard()

    def validate(self, samples: list[TrainingSample], check_stop: Any = None) -> dict[str, Any]:
        """Return loss, accuracy by TTT step and predicted acceptance over the held-out samples."""
        options, steps = self.options, max(self.options.ttt_steps, self.options.draft_tokens)
        self.model.eval()
        packed = pack(samples, options.batch_tokens, None)[self.processes.rank :: self.processes.world]
        total = acceptance.Acceptance(0, [0] * options.draft_tokens)
        counts, losses = torch.zeros(steps, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        with self._whole_weights(), contextlib.closing(self.loader([*packed])) as loader:
            for members, batch in zip(packed, loader, strict=True):
                if check_stop:
                    check_stop()
                if batch.supervised == 0:  # prompts longer than a batch
                    continue
                with torch.inference_mode(), self._autocast:
                    drafted, loss = ttt.draft(self.model, batch.used_here(), steps, *self._loss)
                known = batch.without_states()
                total.add(acceptance.walk_batch(known, members, drafted, options.draft_tokens))
                counts += acceptance.accuracy_counts(known, drafted)
                losses += torch.tensor([float(loss[: options.ttt_steps].sum()), batch.supervised], dtype=torch.float64)
        pooled = torch.cat([counts.flatten(), losses, torch.tensor([total.rounds, *total.accepted]).double()])
        pooled = self.processes.sum(pooled.to(self.processes.device)).cpu()
        counts, losses = pooled[: 2 * steps].view(steps, 2), pooled[2 * steps : 2 * steps + 2]
        rounds, *accepted = pooled[2 * steps + 2 :].long().tolist()
        predicted = acceptance.Acceptance(rounds, accepted)
        return {
            "loss": float(losses[0] / losses[1].clamp(min=1)),
            "accuracy_by_step": (counts[:, 0] / counts[:, 1].clamp(min=1)).tolist(),
            "acceptance": predicted.to_dict(),
        }


class Throughput:
    """Tokens per second since it was made."""

    def __init__(self) -> None:
        self._start, self._tokens = time.monotonic(), 0

    def add(self, tokens: int) -> float:
        """Count tokens and return the rate."""
        self._tokens += tokens
        return self._tokens / max(1e-9, time.monotonic() - self._start)
