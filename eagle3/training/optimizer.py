"""AdamW: torch's; on a GPU with Triton one that clips and skips without the processor's waiting for the gradients.

Muon beside it, for the matrices, is torch's too.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from eagle3.common.options import TrainSection
from eagle3.training.checkpoints import trainable


def make_optimizer(model: Any, options: TrainSection, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters, weight decay on matrices only; `fused`: the AdamW for GPUs."""
    if options.optimizer == "muon":
        return MuonAndAdamW(trainable(model), options)
    parameters = list(trainable(model).values())
    return _adamw(parameters, options, FusedAdamW if fused else torch.optim.AdamW)


def _adamw(parameters: list[torch.nn.Parameter], options: TrainSection, kind: type[torch.optim.AdamW]
           ) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # fused: one pass over the weights instead of a dozen, on CPUs too
    return kind(groups, lr=options.lr, betas=(options.adam_betas[0], options.adam_betas[1]), fused=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (K. Jordan, 2024) for the matrices between residual streams, AdamW for lm_head and norms.

    Muon's updates are scaled to the size of AdamW's (J. Liu et al., arXiv 2502.16982), so one learning rate and one
    weight decay serve both; the rest is torch's default: momentum 0.95 with Nesterov, 5 Newton-Schulz iterations.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], options: TrainSection) -> None:
        """Take the trained parameters by name."""
        matrices = [p for name, p in parameters.items() if p.dim() == 2 and not name.startswith("lm_head.")]
        others = [p for p in parameters.values() if all(p is not matrix for matrix in matrices)]
        super().__init__([*matrices, *others], {})
        self._parts = [torch.optim.Muon(matrices, lr=options.lr, weight_decay=options.weight_decay,
                                        adjust_lr_fn="match_rms_adamw"),
                       _adamw(others, options, torch.optim.AdamW)]
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:  # one state, which checkpoints save and restore
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one step of both."""
        for part in self._parts:
            part.step()


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
