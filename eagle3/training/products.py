"""Matrix products of a training step on a GPU: over copies of the weights in bf16, or of those in float8 (float8.py);
the weights' gradients in float32.

The copies are kept, and renewed by the optimizer as it writes the weights. The gradient of a matrix is one product over
all TTT steps: what goes in and what comes back at each lies in one place.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from eagle3.training import float8, kernels

# Of each float32 matrix its place in a copy in bf16, the whole of that copy, and the version that was copied.
_copies: Any = WeakTensorKeyDictionary()


def in_half(*weights: torch.Tensor) -> torch.Tensor:
    """Return matrices [o, i], one behind the other, in bf16: themselves, or copies that are kept up to date.

    AdamW of optimizer.py writes the copy with the weight; whoever else changes a weight in place is noticed.
    """
    if all(weight.dtype == torch.bfloat16 for weight in weights):  # frozen, or gathered so from other processes
        return weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    known, size = [_copies.get(weight) for weight in weights], sum(map(len, weights))
    if not all(entry and entry[1] is known[0][1] and len(entry[1]) == size and entry[1].device == weight.device
               for entry, weight in zip(known, weights, strict=True)):
        with torch.inference_mode(False):
            whole = torch.empty(size, weights[0].shape[1], dtype=torch.bfloat16,
                                device=weights[0].device)
            parts = whole.split([len(weight) for weight in weights])
        known = [[part, whole, None] for part in parts]
        for weight, entry in zip(weights, known, strict=True):
            _copies[weight] = entry
    for weight, entry in zip(weights, known, strict=True):
        if entry[2] != (weight._version, weight.data_ptr()):
            with torch.inference_mode(False), torch.no_grad():
                entry[0].copy_(weight.detach())
            entry[2] = weight._version, weight.data_ptr()
    return known[0][1]  # type: ignore[no-any-return]


def copy_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the bf16 copy of a matrix if it has one that is up to date, for whoever changes both."""
    entry = _copies.get(weight)
    return entry[0] if entry and entry[2] == (weight._version, weight.data_ptr()) else None


class Product:
    """A product with matrices, side by side, that the steps of a batch share: their gradient is one product over all.

    What goes in at each step lies in one place, and so does the gradient of what comes out; both until the last step
    of the backward pass, the first of the forward one.
    """

    def __init__(self, modules: list[Any], rows: list[int], copy: torch.Tensor | None = None, *, fp8: bool = False
                 ) -> None:
        self.weights = [module.weight for module in modules]
        self.copy = in_half(*self.weights) if copy is None else copy
        self.low = float8.Matrix(self.copy) if fp8 else None
        self.rows, self.open = rows, sum(count > 0 for count in rows)
        self.kept = torch.is_grad_enabled() and any(weight.requires_grad for weight in self.weights)
        self.x: torch.Tensor | None = None
        self.given: torch.Tensor | None = None

    def _slot(self, whole: torch.Tensor, step: int) -> torch.Tensor:
        start = sum(self.rows[:step])
        return whole[start : start + self.rows[step]].data  # .data: what is written to one is no change of another

    def inputs(self, step: int) -> torch.Tensor:
        """Return where the input [R, i] of a step belongs."""
        if not self.kept:
            return self.copy.new_empty(self.rows[step], self.copy.shape[1])
        if self.x is None:
            self.x = self.copy.new_empty(sum(self.rows), self.copy.shape[1])
        return self._slot(self.x, step)

    def outputs(self, step: int) -> torch.Tensor:
        """Return where the gradient of the output [R, o] of a step belongs."""
        if not self.kept:
            return self.copy.new_empty(self.rows[step], len(self.copy))
        if self.given is None:
            self.given = self.copy.new_empty(sum(self.rows), len(self.copy))
        return self._slot(self.given, step)

    def gradients(self, step: int) -> Callable[[], torch.Tensor]:
        """Return `outputs` of a step, to be called in the backward pass."""
        return functools.partial(self.outputs, step)

    def keep(self, tensor: torch.Tensor, place: Callable[[int], torch.Tensor], step: int) -> None:
        """See to it that a tensor is where it belongs, if it is asked for again."""
        if self.kept and tensor.data_ptr() != (slot := place(step)).data_ptr():
            slot.copy_(tensor)

    def __call__(self, x: torch.Tensor, step: int, *, in_place: bool = False) -> torch.Tensor:
        """Return the product [R, o]; `in_place`: its gradient will be put in its place."""
        return _Times.apply(x, self, step, in_place, *self.weights)  # type: ignore[no-any-return]

    def times(self, x: torch.Tensor, step: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product [R, o] of a step, in `out` if given."""
        return self.low.times(x, out) if self.low else torch.mm(x, self.copy.T, out=out)

    def back(self, given: torch.Tensor) -> torch.Tensor:
        """Return the gradient [R, i] of what went in, from that of what came out."""
        return self.low.back(given) if self.low else given @ self.copy

    def done(self) -> list[torch.Tensor | None]:
        """Take it that one more step has left its gradient; with the last, add to those of float32 weights, and return
        those of bf16 ones."""
        self.open -= 1
        if self.open or not self.kept:
            return [None] * len(self.weights)
        x, given, self.x, self.given = self.x, self.given, None, None
        assert x is not None and given is not None
        return self._gradients([(given, x)])

    def _gradients(self, factors: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor | None]:
        sizes, found = [len(weight) for weight in self.weights], []
        for place, weight in enumerate(self.weights):
            found.append(_weight_gradient(weight, [(given.split(sizes, 1)[place], x) for given, x in factors]))
        return found


class Reader(Product):
    """q, k and v, or some of them: the product with normed embedding and normed hidden state, side by side.

    Row r reads at step s the embedding that row r + s read at the first: products with embeddings are done once. Rows
    past the end of their text read a wrong one; they carry no loss at that step, and no gradient.
    """

    def __init__(self, modules: list[Any], copy: torch.Tensor, rows: list[int], model: Any, ids: torch.Tensor, *,
                 fp8: bool = False) -> None:
        self.words, mine = copy.chunk(2, 1)
        super().__init__(modules, rows, mine, fp8=fp8)
        self.norm, self.table, self.ids = model.layers[0].input_layernorm, model.embed_tokens.weight.detach(), ids
        self.embedded = self.copy.new_empty(rows[0], self.words.shape[1])
        with torch.no_grad():
            self.inverses = kernels.norm(self.table, self.norm.weight, self.norm.variance_epsilon, self.embedded,
                                         source=ids)
            self.shares = self.copy.new_zeros(rows[0] + len(rows) - 1, len(self.copy))
            torch.mm(self.embedded, self.words.T, out=self.shares[: rows[0]])

    def times(self, x: torch.Tensor, step: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product [R, o] of a step."""
        share = self.shares[step : step + self.rows[step]]
        return self.low.times(x, out).add_(share) if self.low else torch.addmm(share, x, self.copy.T, out=out)

    def heads(self, x: torch.Tensor, step: int, rope: tuple[torch.Tensor, torch.Tensor],
              scales: tuple[float | None, ...]) -> tuple[torch.Tensor, ...]:
        """Return the product in heads, [R, heads, d] of each matrix, those with a scale under RoPE."""
        return _Heads.apply(x, self, step, *rope, scales, self.norm.weight, *self.weights)  # type: ignore[no-any-return]

    def done(self) -> list[torch.Tensor | None]:
        """Do the same; the gradient of the embeddings' norm comes before those of the weights."""
        self.open -= 1
        if self.open or not self.kept:
            return [None] * (1 + len(self.weights))
        x, given, self.x, self.given = self.x, self.given, None, None
        assert x is not None and given is not None
        total = kernels.shifted_sum(given, len(self.rows))
        _, share = kernels.norm_gradients(total @ self.words, self.table, self.norm.weight, self.inverses,
                                          source=self.ids, inputs=False)
        return [share, *self._gradients([(total, self.embedded), (given, x)])]


def _weight_gradient(weight: torch.Tensor, factors: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Add given.T @ x of each pair, side by side, to the gradient of a float32 weight; return it for a bf16 one."""
    if not weight.requires_grad:
        return None
    if weight.dtype != torch.float32:
        return torch.cat([given.T @ x for given, x in factors], 1)
    first = weight.grad is None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    for part, (given, x) in zip(weight.grad.split([x.shape[1] for _, x in factors], 1), factors, strict=True):
        if first:
            torch.ops.aten.mm.dtype_out(given.T, x, torch.float32, out=part)
        else:
            torch.ops.aten.addmm.dtype_out(part, given.T, x, torch.float32, out=part)
    return None


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: Product, step: int, in_place: bool,
                *weights: torch.Tensor) -> torch.Tensor:
        product.keep(x, product.inputs, step)
        ctx.product, ctx.step = product, step
        return product.times(x, step, product.outputs(step) if in_place else None)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        product = ctx.product
        product.keep(given, product.outputs, ctx.step)
        dx = product.back(given) if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, *product.done())


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: Reader, step: int, cos: torch.Tensor, sin: torch.Tensor,
                scales: tuple[float | None, ...], norm: torch.Tensor,
                *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product.keep(x, product.inputs, step)
        ctx.product, ctx.step, ctx.scales = product, step, scales
        ctx.save_for_backward(cos, sin)
        size = cos.shape[1]
        parts = product.times(x, step).unflatten(1, (-1, size)).split([len(weight) // size for weight in weights], 1)
        for part, scale in zip(parts, scales, strict=True):
            if scale is not None:
                kernels.rotate(part, cos, sin, scale, part)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        gradient = ctx.product.outputs(ctx.step)
        parts = gradient.unflatten(1, (-1, cos.shape[1])).split([part.shape[1] for part in given], 1)
        for part, own, scale in zip(given, parts, ctx.scales, strict=True):
            if scale is None:
                own.copy_(part)
            else:
                kernels.rotate(part.contiguous(), cos, sin, scale, own, back=True)
        dx = ctx.product.back(gradient) if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, None, *ctx.product.done())
