"""Training a drafter: schedule, optimizer step, validation, processes.

The loss of a step is the mean over all its supervised positions, whatever batch or process they are in, so
one process with accumulation 2 and two processes compute the same step. Several processes share weights,
gradients and optimizer state: each holds its rows of every tensor (FSDP2).
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from eagle3 import acceptance, ttt, workers
from eagle3.batches import Batch, Prefetcher, TrainingSample, collate, pack
from eagle3.errors import StageError
from eagle3.options import TrainSection
from eagle3.states import StateStore
from eagle3.trainstate import trainable

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


def learning_rate(step: int, total: int, options: TrainSection) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then half a cosine to min_lr_ratio."""
    warmup = max(1, math.ceil(total * options.warmup_ratio))
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    low = options.min_lr_ratio
    return options.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: Any, options: TrainSection) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters; weight decay on matrices only."""
    parameters = list(trainable(model).values())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # fused: one pass over the weights instead of a dozen, on CPUs too
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.adam_betas[0], options.adam_betas[1]), fused=True)


class Plan:
    """The steps of a run: which samples go into which batch of which optimizer step."""

    def __init__(self, samples: list[TrainingSample], options: TrainSection, batches_per_step: int) -> None:
        self._samples, self._options, self.batches_per_step = samples, options, batches_per_step
        self.steps_per_epoch = [-(-len(self.packed(epoch)) // batches_per_step) for epoch in range(options.epochs)]
        self.total_steps = sum(self.steps_per_epoch)

    def packed(self, epoch: int) -> list[list[TrainingSample]]:
        """Return the batches of an epoch in their order."""
        return pack(self._samples, self._options.batch_tokens, self._options.seed, epoch)

    def steps(self, epoch: int) -> list[list[list[TrainingSample]]]:
        """Return an epoch's optimizer steps, each a list of batches (the last step may have fewer)."""
        packed, size = self.packed(epoch), self.batches_per_step
        return [packed[start : start + size] for start in range(0, len(packed), size)]


def supervised(members: list[TrainingSample], batch_tokens: int) -> int:
    """Return how many positions of a batch carry loss, without loading it."""
    return sum(int(sample.supervised(batch_tokens).sum()) for sample in members)


class Objective(torch.nn.Module):
    """A drafter with its loss as one module: FSDP gathers weights before a module's forward and reduces gradients
    after its backward, and the loss calls the drafter's parts one by one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch | None, *arguments: Any) -> torch.Tensor:
        """Return `ttt.loss`; without a batch a zero with zero gradients, by which a process takes part in a step."""
        if batch is not None:
            return ttt.loss(self.model, batch, *arguments)
        return torch.stack([0.0 * parameter.sum() for parameter in trainable(self.model).values()])


def vectors(objective: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters of one dimension, the weights of the norms."""
    return [parameter for parameter in objective.parameters() if parameter.requires_grad and parameter.dim() == 1]


def shard(objective: Objective, dtype: torch.dtype) -> None:
    """Divide the trained matrices among the processes, float32 rows of each; the rest stays whole everywhere.

    The matrices are one group, gathered before a forward and reduced (in float32) after the backward: the drafter is
    one layer, so there is nothing to gather ahead of another. The weights of the norms stay in float32, as they are in
    a single process: they are near 1, where bfloat16 knows steps of 1/128 only and most updates are smaller.

    Args:
        dtype: in which the matrices are gathered and used.
    """
    frozen = {parameter for parameter in objective.parameters() if not parameter.requires_grad}
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(objective, mp_policy=policy, reshard_after_forward=False, ignored_params=frozen | {*vectors(objective)})


class Trainer:
    """Runs optimizer steps and validation on one process of the group."""

    def __init__(self, model: Any, store: StateStore, options: TrainSection, processes: Processes) -> None:
        from speculators.losses import resolve_loss_config

        self.model, self.store, self.options, self.processes = model, store, options, processes
        self._loss = resolve_loss_config(options.loss, "eager"), options.ttt_step_loss_decay
        bf16 = options.dtype == "bfloat16" or (options.dtype == "auto" and processes.device.type == "cuda")
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        self._autocast = torch.autocast(processes.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        self._objective = Objective(model)
        for parameter in model.parameters():
            if not parameter.requires_grad:  # the verifier's, which has them in no more than bfloat16
                parameter.data = parameter.data.to(self._dtype)
        if processes.world > 1:
            shard(self._objective, self._dtype)
        self.optimizer = make_optimizer(model, options)
        self._verified: set[int] = set()

    def load_batch(self, members: list[TrainingSample]) -> Batch:
        """Load a batch; each file's checksum is checked the first time it is read."""
        fresh = any(sample.i not in self._verified for sample in members)
        steps = max(self.options.ttt_steps, self.options.draft_tokens)
        batch = collate(self.store, members, self.options.batch_tokens, steps, verify=fresh)
        self._verified.update(sample.i for sample in members)
        return batch

    def loader(self, steps: list[list[list[TrainingSample]]]) -> Prefetcher:
        """Return a prefetcher over this process's batches of the given steps (None where it has none)."""
        mine = [step[rank] if rank < len(step) else None
                for step in steps for rank in self._my_slots()]
        return Prefetcher(mine, lambda members: None if members is None else self.load_batch(members))

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
                self.processes.sum(parameter.grad).div_(self.processes.world)
        loss_value = float(self.processes.sum(loss_sum))
        norm = clip(trainable(self.model).values(), self.options.max_grad_norm or math.inf)
        if not math.isfinite(loss_value) or not math.isfinite(norm):
            raise StageError("the loss is not finite", found=f"loss {loss_value}, gradient norm {norm}",
                             fix="lower --lr and run the same command again: add --out to keep this result")
        self.optimizer.step()
        return {"loss": loss_value, "grad_norm": norm, "lr": rate}

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.processes.device, self._dtype)

    def _losses(self, batch: Batch | None, last: bool) -> torch.Tensor:
        """Return the losses of a batch; gradients are summed up here until the last of a step."""
        if isinstance(self._objective, FSDPModule):
            self._objective.set_requires_gradient_sync(last)
        with self._autocast:
            batch = batch and self._on_device(batch)
            return self._objective(batch, self.options.ttt_steps, *self._loss)  # type: ignore[no-any-return]

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
        packed = pack(samples, options.batch_tokens, None)
        total = acceptance.Acceptance(0, [0] * options.draft_tokens)
        counts, losses = torch.zeros(steps, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        with self._whole_weights():
            for members in packed[self.processes.rank :: self.processes.world]:
                if check_stop:
                    check_stop()
                batch = self.load_batch(members)
                if batch.supervised == 0:  # prompts longer than a batch
                    continue
                with torch.inference_mode(), self._autocast:
                    drafted, loss = ttt.draft(self.model, self._on_device(batch), steps, *self._loss)
                total.add(acceptance.walk_batch(batch, members, drafted, options.draft_tokens))
                counts += acceptance.accuracy_counts(batch, drafted)
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


def clip(parameters: Iterable[torch.nn.Parameter], largest: float) -> float:
    """Scale gradients down to a common norm of at most `largest`; return the norm that they had."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    divided = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [torch.nn.utils.get_total_norm(group) for group in (divided, whole) if group]
    norm = math.hypot(*(float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms))
    if norm > largest:  # seldom: most steps are spared a pass over all gradients
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(largest / norm)
    return norm


class Throughput:
    """Tokens per second since it was made."""

    def __init__(self) -> None:
        self._start, self._tokens = time.monotonic(), 0

    def add(self, tokens: int) -> float:
        """Count tokens and return the rate."""
        self._tokens += tokens
        return self._tokens / max(1e-9, time.monotonic() - self._start)
