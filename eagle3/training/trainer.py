"""Training a drafter: optimizer step, validation, processes.

The loss of a step is the mean over all its supervised positions, whatever batch or process they are in, so
one process with accumulation 2 and two processes compute the same step. Several processes share weights,
gradients and optimizer state: each holds its rows of every matrix (FSDP2).
"""

import contextlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from eagle3.common import workers
from eagle3.common.log import logger, size
from eagle3.common.options import TrainSection
from eagle3.states.store import DamagedStates, StateStore
from eagle3.training import losses, ttt
from eagle3.training.batches import Batch, TrainingSample, collate, pack
from eagle3.training.checkpoints import trainable
from eagle3.training.memory import Step, too_large
from eagle3.training.optimizer import FusedAdamW, make_optimizer
from eagle3.training.prefetch import Prefetcher
from eagle3.training.sharding import Objective, clip, gradient_norms, shard, vectors
from eagle3.training.validation import Tally

DRAFT_TOKENS = 3  # whose length is predicted where nobody says which are served
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

    def all_of(self, value: Any) -> list[Any]:
        """Return what each process has for it."""
        values = [value]
        if self.world > 1:
            values *= self.world
            dist.all_gather_object(values, value)
        return values

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


def step_of(model: Any) -> Step:
    """Return the sizes of a drafter from which memory is estimated."""
    own, mlp = model.layers[0].self_attn, model.layers[0].mlp
    parameters = [*model.parameters()]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Step(model.hidden_size, len(own.q_proj.weight), len(own.k_proj.weight), len(mlp.gate_proj.weight),
                len(model.lm_head.weight), trained, sum(parameter.numel() for parameter in parameters) - trained)


class Trainer:
    """Runs optimizer steps and validation on one process of the group.

    Attributes:
        left_out: numbers of the samples that no process trains on, as all have agreed.
        damaged: what this process found wrong with samples' files, by number.
    """

    def __init__(self, model: Any, store: StateStore, options: TrainSection, processes: Processes,
                 served: list[int] | None = None) -> None:
        """Take what is trained on what; `served` are the draft-token counts that validation is about."""
        self.model, self.store, self.options, self.processes = model, store, options, processes
        self.served = served or [options.draft_tokens or DRAFT_TOKENS]
        self.left_out: set[int] = set()
        self.damaged: dict[int, DamagedStates] = {}
        self._loss = losses.of(options.loss), options.ttt_step_loss_decay
        self.bf16 = bf16 = options.dtype == "bfloat16" or (options.dtype == "auto" and processes.device.type == "cuda")
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self._autocast = torch.autocast(processes.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        self._objective = Objective(model)
        self.recompute = self._has_to_recompute()
        for parameter in model.parameters():
            if not parameter.requires_grad:  # the verifier's, which has them in no more than bfloat16
                parameter.data = parameter.data.to(self._dtype)
        if processes.world > 1:
            shard(self._objective, self._dtype)
        self.optimizer = make_optimizer(model, options, fused=ttt.fused_on(processes.device))
        self._verified: set[int] = set()
        self._stream = torch.cuda.Stream(processes.device) if processes.device.type == "cuda" else None
        self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "reader")

    def load_batch(self, members: list[TrainingSample], steps: int | None = None) -> Batch | None:
        """Load a batch to the device; each file's checksum is checked the first time it is read.

        Args:
            steps: TTT steps; default: those of training.
        Returns:
            The batch without samples whose file is damaged, as far as --max-failures allows; None when none is left.
        """
        while left := [each for each in members if each.i not in self.left_out and each.i not in self.damaged]:
            fresh = any(sample.i not in self._verified for sample in left)
            try:
                with self._beside_training():
                    batch = collate(self.store, left, self.options.batch_tokens, steps or self.options.ttt_steps, fresh,
                                    self.processes.device, self._dtype, self._readers)
            except DamagedStates as error:
                if not self.options.max_failures:
                    raise
                self.damaged[next(each.i for each in left if self.store.path(each.i) == error.path)] = error
                continue
            self._verified.update(sample.i for sample in left)
            return batch
        return None

    def newly_damaged(self, batches: list[list[TrainingSample] | None]) -> dict[int, str]:
        """Return what is wrong with which samples of batches that were loaded, as all processes find together; each
        names its own batches. What was left out before is not new."""
        mine = {sample.i for members in batches for sample in members or []} & self.damaged.keys() - self.left_out
        if not self.processes.any(bool(mine)):
            return {}
        found = self.processes.all_of({number: str(self.damaged[number].parts["found"]) or self.damaged[number].what
                                       for number in mine})
        return dict(sorted((number, reason) for each in found for number, reason in each.items()))

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

    def loader(self, batches: list[list[TrainingSample] | None], steps: int | None = None) -> Prefetcher:
        """Return a prefetcher over batches (None stays None)."""
        return Prefetcher(batches, lambda members: None if members is None else self.load_batch(members, steps))

    def mine(self, steps: list[list[list[TrainingSample]]]) -> list[list[TrainingSample] | None]:
        """Return this process's batches of the given steps, None where it has none."""
        return [step[rank] if rank < len(step) else None for step in steps for rank in self._my_slots()]

    def _my_slots(self) -> range:
        per_step = self.options.accumulation * self.processes.world
        return range(self.processes.rank, per_step, self.processes.world)

    def step(self, batches: list[Batch | None], total_supervised: int, rate: float, limit: float = math.inf, *,
             counted: bool = False) -> dict[str, Any]:
        """Do one optimizer step and return loss, grad_norm and lr; weights and moments stay as they are if loss or norm
        is not finite or the norm above `limit`.

        Args:
            counted: return accuracy_by_step and conditional_accuracy as well.
        """
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        device = self.processes.device
        loss_sum = torch.zeros((), device=device)
        counts = torch.zeros(self.options.ttt_steps, 3, dtype=torch.int64, device=device) if counted else None
        for number, batch in enumerate(batches):
            if batch is not None and batch.supervised == 0:
                batch = None
            if batch is None and self.processes.world == 1:
                continue
            loss = self._losses(batch, number == len(batches) - 1, counts).sum() / max(1, total_supervised)
            (loss * self.processes.world).backward()  # the mean over the processes is taken of what each has
            loss_sum += loss.detach()
        if self.processes.world > 1:  # FSDP has done so with the matrices
            for parameter in vectors(self._objective):
                if parameter.grad is not None:
                    self.processes.sum(parameter.grad).div_(self.processes.world)
        loss_value, norm = self._update(self.processes.sum(loss_sum), limit)
        figures: dict[str, Any] = {"loss": loss_value, "grad_norm": norm, "lr": rate}
        if counts is not None:
            right, judged, given = self.processes.sum(counts).double().cpu().unbind(1)
            figures["accuracy_by_step"] = (right / judged.clamp(min=1)).tolist()
            figures["conditional_accuracy"] = (right / given.clamp(min=1)).tolist()
        return figures

    def _update(self, loss_sum: torch.Tensor, limit: float) -> tuple[float, float]:
        """Clip gradients and take them into the weights, unless loss or norm is not finite or the norm above `limit`;
        return the two."""
        largest = self.options.max_grad_norm or math.inf
        parameters = [*trainable(self.model).values()]
        norms = gradient_norms(parameters)
        if isinstance(self.optimizer, FusedAdamW):
            return self.optimizer.clipped_step(loss_sum, norms, largest, limit)
        loss, norm = float(loss_sum), math.hypot(*map(float, norms))
        if math.isfinite(loss) and math.isfinite(norm) and norm <= limit:
            clip(parameters, norm, largest)
            self.optimizer.step()
        return loss, norm

    def _losses(self, batch: Batch | None, last: bool, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the losses of a batch; gradients are summed up here until the last of a step."""
        if isinstance(self._objective, FSDPModule):
            self._objective.set_requires_gradient_sync(last)
        with self._autocast:
            return self._objective(  # type: ignore[no-any-return]
                batch and batch.used_here(), self.options.ttt_steps, *self._loss, counts, self.recompute,
                self.options.matmul == "fp8")

    def _has_to_recompute(self) -> bool:
        """Say whether layer, head and loss are computed again in the backward pass."""
        device, options = self.processes.device, self.options
        if options.recompute != "auto" or device.type != "cuda":
            return options.recompute == "on"
        sizes, moments = step_of(self.model), 4 if options.moments == "bf16" else 8
        needed = sizes.peak(options.batch_tokens, options.ttt_steps, moments=moments, processes=self.processes.world,
                            fp8=options.matmul == "fp8")
        if options.loss != "kl_div" or ttt.has_norms(self.model) or not (self.bf16 and ttt.fused_on(device)):
            needed = sizes.fixed(moments, self.processes.world, self.bf16) + 4 * sizes.trained + sizes.plain(
                options.batch_tokens, options.ttt_steps, self.bf16)
        needed += sizes.ahead(options.batch_tokens)
        if again := too_large(needed, torch.cuda.get_device_properties(device).total_memory):
            logger.info("a step would take about %s: its layer, head and loss are computed again in the backward pass "
                        "(--recompute off would not)", size(needed))
        return again

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
        """Return loss, accuracies and predicted acceptance over the held-out samples: `Tally.figures`."""
        options, steps = self.options, max(self.options.ttt_steps, *self.served)
        self.model.eval()
        packed = pack(samples, options.batch_tokens, None)[self.processes.rank :: self.processes.world]
        tally = Tally(samples, steps, self.served)
        with self._whole_weights(), contextlib.closing(self.loader([*packed], steps)) as loader:
            for batch in loader:
                if check_stop:
                    check_stop()
                if batch is None or batch.supervised == 0:  # prompts longer than a batch
                    continue
                with torch.inference_mode(), self._autocast:
                    drafted, loss = ttt.draft(self.model, batch.used_here(), steps, *self._loss)
                tally.add(batch.without_states(), drafted, float(loss[: options.ttt_steps].sum()))
        tally.pool(self.processes)
        return tally.figures()
