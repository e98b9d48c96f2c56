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
    half = options.moments == "bf16"
    made = _adamw(parameters, options, FusedAdamW if fused else HalfMomentsAdamW if half else torch.optim.AdamW)
    if isinstance(made, FusedAdamW | HalfMomentsAdamW) and half:
        first = options.seed * 1_000_003
        made.seeds = {parameter: first + 8191 * number for number, parameter in enumerate(parameters)}
    return made


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


def round_stochastically(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return float32 x in bf16: one of its two neighbours there, the nearer the likelier, so that on average it is x.

    Args:
        noise: of x's shape, int32 in 0..65535, uniform.
    """
    return ((x.view(torch.int32) + noise) & -65536).view(torch.float32).to(torch.bfloat16)


def _seed_of(seed: int, step: int) -> int:
    """Return the seed of a matrix's rounding at a step: of these two alone, so that a resumed run rounds alike."""
    return (seed + 7_368_787 * step) % (2**31 - 1)


class HalfMomentsAdamW(torch.optim.AdamW):
    """AdamW with moments in bf16 between steps, rounded stochastically: rounded to nearest, a moment that changes by
    less than 1/256 of itself a step would stand still."""

    seeds: dict[torch.Tensor, int]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one step, computed in float32."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._one(weight, group)

    def _one(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        state, (keep, keep_square) = self.state[weight], group["betas"]
        if not state:
            state |= _fresh(weight, torch.bfloat16)
        state["step"] = state["step"].cpu() + 1
        assert weight.grad is not None
        step, own, gradient = int(state["step"]), _local(weight), _local(weight.grad)
        generator = torch.Generator(own.device).manual_seed(_seed_of(self.seeds[weight], step))
        moments = [_local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        mean = moments[0].float().lerp_(gradient, 1 - keep)
        square = moments[1].float().mul_(keep_square).addcmul_(gradient, gradient, value=1 - keep_square)
        own.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square.sqrt() / (1 - keep_square**step) ** 0.5).add_(group["eps"])
        own.addcdiv_(mean, root, value=-group["lr"] / (1 - keep**step))
        for moment, value in zip(moments, (mean, square), strict=True):
            noise = torch.randint(65536, value.shape, dtype=torch.int32, device=value.device, generator=generator)
            moment.copy_(round_stochastically(value, noise))


def _fresh(weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(weight, dtype=dtype)}


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW in one pass on a GPU: gradients are scaled, and copies of weights in bf16 renewed, on the way.

    Attributes:
        seeds: of each weight whose moments are in bf16, rounded as in HalfMomentsAdamW though not by the same numbers.
    """

    seeds: dict[torch.Tensor, int] = {}  # noqa: RUF012 - replaced as a whole

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
                    state |= _fresh(weight, torch.bfloat16 if weight in self.seeds else weight.dtype)
                state["step"] = state["step"].cpu() + 1  # only one that was loaded is on the GPU
                kernels.adamw(_local(weight), _local(weight.grad), _local(state["exp_avg"]),
                              _local(state["exp_avg_sq"]), products.copy_of(weight), factor, int(state["step"]),
                              group["lr"], group["betas"], group["eps"], group["weight_decay"],
                              _seed_of(self.seeds[weight], int(state["step"])) if weight in self.seeds else None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
