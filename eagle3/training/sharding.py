"""What several GPUs share of a drafter in training: its matrices, their gradients and moments (FSDP2)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from eagle3.training import ttt
from eagle3.training.batches import Batch
from eagle3.training.checkpoints import trainable


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


def gradient_norms(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return norms [] of gradients, on their device, of which the norm is that of all; the same in all processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    divided = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [torch.nn.utils.get_total_norm(group) for group in (divided, whole) if group]
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]


def clip(parameters: Iterable[torch.nn.Parameter], norm: float, largest: float) -> None:
    """Scale gradients down from their common norm to one of at most `largest`."""
    if norm <= largest:  # mostly: most steps are spared a pass over all gradients
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(largest / norm)
