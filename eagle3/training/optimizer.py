"""AdamW: torch's; on a GPU with Triton one that clips and skips without the processor's waiting for the gradients."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from eagle3.common.options import TrainSection
from eagle3.training.checkpoints import trainable


def make_optimizer(model: Any, options: TrainSection, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters, weight decay on matrices only; `fused`: the one for GPUs."""
    parameters = list(trainable(model).values())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # fused: one pass over the weights instead of a dozen, on CPUs too
    kind = FusedAdamW if fused else torch.optim.AdamW
    return kind(groups, lr=options.lr, betas=(options.adam_betas[0], options.adam_betas[1]), fused=True)


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW in one pass on a GPU: gradients are scaled, and copies of weights in bf16 renewed, on the way."""

    @torch.no_grad()
    def clipped_step(self, loss: torch.Tensor, norms: list[torch.Tensor], largest: float, limit: float = math.inf
                     ) -> tuple[float, float]:
        """Do one step with gradients scaled down to a norm of at most `largest`; return loss and norm.

        Whether both are finite, and the norm at most `limit`, is seen on the GPU, where a step that has them otherwise
        changes nothing: so the next kernels are queued before this is known here.
        """
        norm = torch.stack(norms or [torch.zeros_like(loss)]).norm()
        taken = torch.isfinite(loss) & torch.isfinite(norm) & (norm <= limit)
        self._step(torch.where(taken, (largest / norm).clamp(max=1.0), 0.0))
        values = torch.stack([loss.float(), norm]).tolist()
        if not all(map(math.isfinite, values)) or values[1] > limit:
            for state in self.state.values():
                state["step"] -= 1
        return values[0], values[1]

    def _step(self, factor: torch.Tensor) -> None:
        """Do one step with gradients times factor [] float32; with 0 nothing is changed."""
        from eagle3.training import kernels, products

        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight),
                              "exp_avg_sq": torch.zeros_like(weight)}
                state["step"] = state["step"].cpu() + 1  # only one that was loaded is on the GPU
                kernels.adamw(_local(weight), _local(weight.grad), _local(state["exp_avg"]),
                              _local(state["exp_avg_sq"]), products.copy_of(weight), factor, int(state["step"]),
                              group["lr"], group["betas"], group["eps"], group["weight_decay"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
