"""Matrix products of a training step in float8 (e4m3), each row of both factors with a scale of its own.

Only what goes forward through the layer and the gradients of its inputs: weights stay float32, their gradients are
products of bf16 factors, and so are fc, which reads states whose channels differ a thousandfold, and head and teacher,
whose logits the loss is about. An error of rounding (2.7% of a row, 3.7% of a product) is fresh in each step, and none
of it stays in a weight. Validation, like the engine, computes in bf16.
"""

import functools
from typing import Any

import torch

from eagle3.drafter import network

FORM = torch.float8_e4m3fn
LARGEST = 448.0  # torch.finfo(FORM).max
_LEAST = 1e-12  # a row of zeros has a scale too
_ALIGNED = 16  # what torch._scaled_mm wants of both sizes of a matrix
_CARD = (8, 9)  # Ada; Hopper is (9, 0)


class Matrix:
    """A matrix [o, i] in bf16, and what products with it need of it in float8, made at its first use."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole

    @functools.cached_property
    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return by_rows(self.whole)

    @functools.cached_property
    def _backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return by_rows(self.whole.T.contiguous())

    def times(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ matrix.T, [R, o] in bf16, of x [R, i] in bf16; in `out` if given."""
        return _multiply(x, self._forward, out)

    def back(self, given: torch.Tensor) -> torch.Tensor:
        """Return given @ matrix, [R, i] in bf16, of the gradient given [R, o] in bf16."""
        return _multiply(given, self._backward)


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x [R, K] in float8, and the scale [R, 1] float32 of each: its largest value over 448.

    What is not finite leaves a NaN in its row, and so in all of a product with it.
    """
    if x.is_cuda:
        from eagle3.training import kernels

        return kernels.to_float8(x, FORM, LARGEST, _LEAST)
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=_LEAST) / LARGEST
    return (x.float() / scales).to(FORM), scales


def _multiply(x: torch.Tensor, other: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None = None
              ) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, len(other[0])) if out is None else out
    mine, scales = by_rows(x)
    return torch._scaled_mm(mine, other[0].T, scales, other[1].view(1, -1), out_dtype=torch.bfloat16,
                            use_fast_accum=True, out=out)


def refusal(model: Any, device: torch.device, fused: bool) -> str | None:
    """Say why a drafter's products cannot be in float8 on a device; None if they can.

    Args:
        fused: whether the fused forms of a step run there, in bf16: only they have such products.
    """
    if device.type != "cuda":
        return "no GPU is in use"
    if (card := torch.cuda.get_device_capability(device)) < _CARD:
        return (f"{torch.cuda.get_device_name(device)} has no float8 products: they begin with compute capability "
                f"{'.'.join(map(str, _CARD))}, this is {'.'.join(map(str, card))}")
    if norms := network.norms_of(model):
        return f"the drafter has {', '.join(norms)}, which the fused step does not know"
    if not fused:
        return "the fused step, which has them, does not run here"
    layer = model.layers[0]
    for name, module in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
        if (weight := getattr(module, "weight", None)) is not None and any(size % _ALIGNED for size in weight.shape):
            return f"{name} has {' x '.join(map(str, weight.shape))} weights, not multiples of {_ALIGNED}"
    return None
