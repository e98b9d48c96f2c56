"""A training step's forward and backward on a GPU in bf16: few passes over memory between the matrix products.

What is computed is ttt.py's; how, is this: products of q, k and v, and of gate and up, are one each, over copies of
the weights in bf16 that the optimizer keeps up to date; gradients of weights are added up in float32 by the products
themselves; what lies between two products is one kernel, and works in place where nobody reads its input again. So
a backward pass can be taken once only, as training does.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from eagle3.training import attention_kernels, kernels
from eagle3.training.attention import Layout, flash
from eagle3.training.batches import Batch


def logits_by_step(model: Any, batch: Batch, steps: int) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the draft logits [N, D] of the rows that are judged there."""
    layer, own, mlp = model.layers[0], model.layers[0].self_attn, model.layers[0].mlp
    layout, rows = Layout.of(batch.spans, batch.ids.device), [len(batch.rows)] * steps
    whole = layout.rows is None
    positions = batch.positions[batch.rows]
    fc = _Product([model.fc], [len(layout.tokens)])
    qkv = _Product([own.q_proj, own.k_proj, own.v_proj], rows if whole else [0, *rows[1:]])
    o, down = _Product([own.o_proj], rows), _Product([mlp.down_proj], rows)
    gate_up = _Product([mlp.gate_proj, mlp.up_proj], rows)
    head = _Product([model.lm_head], [len(judged) for judged, _ in batch.judged[:steps]])
    rope, scales = functools.partial(_rope, model), (own.head_dim**-0.5, 1.0, None)

    residual = fc(torch.index_select(batch.aux, 0, layout.tokens, out=fc.inputs(0)), 0)
    ids = batch.ids[layout.tokens]
    if whole:
        inputs, residual = _layer_input(model, ids, residual, qkv.inputs(0))
        query, keys, values = qkv.heads(inputs, 0, rope(positions), scales)
    else:
        kv, q = qkv.part(slice(1, 3), len(layout.tokens)), qkv.part(slice(0, 1), rows[0])
        inputs, residual = _layer_input(model, ids, residual, kv.inputs(0))
        keys, values = kv.heads(inputs, 0, rope(batch.positions[layout.tokens]), scales[1:])
        inputs = _Rows.apply(inputs, layout.rows, q.inputs(0))
        residual = _Rows.apply(residual, layout.rows, torch.empty_like(residual[: rows[0]]))
        (query,) = q.heads(inputs, 0, rope(positions), scales[:1])
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        if step:
            # rows past the end of their text read a wrong token; they carry no loss at this step
            ids = batch.ids[(batch.rows + step).clamp(max=len(batch.ids) - 1)]
            inputs, residual = _layer_input(model, ids, residual, qkv.inputs(step))
            query, key, value = qkv.heads(inputs, step, rope(positions + step), scales)
            drafted.append((key, value))
        attended = flash(query, keys, values, drafted, layout, attention_kernels, o.inputs(step))
        residual, inputs = _add_norm(residual, o(attended.flatten(1), step), layer.post_attention_layernorm,
                                     gate_up.inputs(step), gives=o.gradients(step))
        mixed = _SwiGLU.apply(gate_up(inputs, step, in_place=True), down.inputs(step))
        residual, hidden = _add_norm(residual, down(mixed, step), model.norm, head.inputs(step),
                                     gives=down.gradients(step), rows=batch.judged[step][0])
        yield head(hidden, step, in_place=True)


def _rope(model: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty(0, dtype=torch.bfloat16, device=positions.device)
    cos, sin = model.rotary_emb(like, positions[None])
    return cos[0].contiguous(), sin[0].contiguous()


def norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Return the RMS norm of x [N, H], in the dtype of x whatever that of the weight is; it has no gradient."""
    out = torch.empty_like(x)
    kernels.norm(x, module.weight, module.variance_epsilon, out)
    return out


def divergence(logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return KL(target || draft) [N] in float32 of draft logits [N, D] and the rows `places` [N] of target logits
    [S, D]. The backward pass puts the gradient in the place of the logits."""
    return _Divergence.apply(logits, targets, places)  # type: ignore[no-any-return]


# --- weights ----------------------------------------------------------------------------------------------

# Of each float32 matrix its place in a copy in bf16, the whole of that copy, and the version that was copied.
_copies: Any = WeakTensorKeyDictionary()


def in_half(*weights: torch.Tensor) -> torch.Tensor:
    """Return matrices [o, i], one behind the other, in bf16: themselves, or copies that are kept up to date.

    AdamW of optimizer.py writes the copy with the weight; whoever else changes a weight in place is noticed.
    """
    if all(weight.dtype == torch.bfloat16 for weight in weights):  # frozen, or gathered so from other processes
        return weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    known = [_copies.get(weight) for weight in weights]
    if not all(entry and entry[1] is known[0][1] and entry[0].device == weight.device
               for entry, weight in zip(known, weights, strict=True)):
        with torch.inference_mode(False):
            whole = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=torch.bfloat16,
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


class _Product:
    """A product with matrices, side by side, that the steps of a batch share: their gradient is one product over all.

    What goes in at each step lies in one place, and so does the gradient of what comes out; both until the last step
    of the backward pass, the first of the forward one.
    """

    def __init__(self, modules: list[Any], rows: list[int]) -> None:
        self.weights = [module.weight for module in modules]
        self.copy = in_half(*self.weights)
        self.rows, self.open = rows, sum(count > 0 for count in rows)
        self.kept = torch.is_grad_enabled() and any(weight.requires_grad for weight in self.weights)
        self.x: torch.Tensor | None = None
        self.given: torch.Tensor | None = None

    def part(self, which: slice, rows: int) -> "_Product":
        """Return a product with some of the matrices at one step of its own."""
        sizes = [len(weight) for weight in self.weights]
        part = copy.copy(self)
        part.weights, part.rows, part.open = self.weights[which], [rows], 1
        part.copy = self.copy[sum(sizes[: which.start]) : sum(sizes[: which.stop])]
        return part

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

    def heads(self, x: torch.Tensor, step: int, rope: tuple[torch.Tensor, torch.Tensor],
              scales: tuple[float | None, ...]) -> tuple[torch.Tensor, ...]:
        """Return the product in heads, [R, heads, d] of each matrix, those with a scale under RoPE."""
        return _Heads.apply(x, self, step, *rope, scales, *self.weights)  # type: ignore[no-any-return]

    def weight_gradients(self) -> list[torch.Tensor | None]:
        """Take it that one more step has left its gradient; with the last, add to those of float32 weights, and return
        those of bf16 ones."""
        self.open -= 1
        if self.open or not self.kept:
            return [None] * len(self.weights)
        x, given, self.x, self.given = self.x, self.given, None, None
        assert x is not None and given is not None
        parts = given.split([len(weight) for weight in self.weights], 1)
        return [_weight_gradient(weight, part, x) for weight, part in zip(self.weights, parts, strict=True)]


def _weight_gradient(weight: torch.Tensor, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if not weight.requires_grad:
        return None
    if weight.dtype != torch.float32:
        return given.T @ x
    if weight.grad is None:
        weight.grad = torch.mm(given.T, x, out_dtype=torch.float32)
    else:
        torch.ops.aten.addmm.dtype_out(weight.grad, given.T, x, torch.float32, out=weight.grad)
    return None


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: _Product, step: int, in_place: bool,
                *weights: torch.Tensor) -> torch.Tensor:
        product.keep(x, product.inputs, step)
        ctx.product, ctx.step = product, step
        return torch.mm(x, product.copy.T, out=product.outputs(step)) if in_place else x @ product.copy.T

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        product = ctx.product
        product.keep(given, product.outputs, ctx.step)
        dx = given @ product.copy if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, *product.weight_gradients())


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: _Product, step: int, cos: torch.Tensor, sin: torch.Tensor,
                scales: tuple[float | None, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product.keep(x, product.inputs, step)
        ctx.product, ctx.step, ctx.scales = product, step, scales
        ctx.save_for_backward(cos, sin)
        size = cos.shape[1]
        parts = (x @ product.copy.T).unflatten(1, (-1, size)).split([len(weight) // size for weight in weights], 1)
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
        dx = gradient @ ctx.product.copy if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, None, *ctx.product.weight_gradients())


# --- between the products ---------------------------------------------------------------------------------


def _layer_input(
    model: Any, ids: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what q, k and v read, norms of embedding and hidden state side by side, in out [N, 2H]; and hidden."""
    layer = model.layers[0]
    norms = layer.input_layernorm, layer.hidden_norm
    return _LayerInput.apply(model.embed_tokens.weight.detach(), ids, hidden, out,  # type: ignore[no-any-return]
                             *(module.weight for module in norms), *(module.variance_epsilon for module in norms))


class _LayerInput(torch.autograd.Function):
    """The norms of embedding and hidden state, and the hidden state itself for what else needs it."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor,
                *norms: Any) -> Any:
        embedding_weight, hidden_weight, *eps = norms
        left, right = out.chunk(2, 1)
        inverses = (kernels.norm(table, embedding_weight, eps[0], left, source=ids),
                    kernels.norm(hidden, hidden_weight, eps[1], right))
        ctx.save_for_backward(table, ids, hidden, embedding_weight, hidden_weight, *inverses)
        ctx.set_materialize_grads(False)
        return out, hidden

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        table, ids, hidden, embedding_weight, hidden_weight, left_inverses, right_inverses = ctx.saved_tensors
        left, right = given.chunk(2, 1)
        _, left_share = kernels.norm_gradients(left, table, embedding_weight, left_inverses, source=ids, inputs=False)
        dhidden, right_share = kernels.norm_gradients(right, hidden, hidden_weight, right_inverses,
                                                      passed=None if passed is None else passed.contiguous())
        return None, None, dhidden, None, left_share, right_share, None, None


def _add_norm(residual: torch.Tensor, delta: torch.Tensor, module: Any, out: torch.Tensor, *,
              gives: Callable[[], torch.Tensor], rows: torch.Tensor | None = None) -> Any:
    """Return residual + delta [N, H] and its norm in out, of `rows` [M] only if given (each at most once); `gives` says
    where the gradient of delta belongs."""
    place = None
    if rows is not None and len(rows) < len(residual):
        place = torch.full((len(residual),), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
    return _AddNorm.apply(residual, delta, module.weight, module.variance_epsilon, place, out, gives)


class _AddNorm(torch.autograd.Function):
    """A sum and the norm of it."""

    @staticmethod
    def forward(ctx: Any, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float,
                place: torch.Tensor | None, out: torch.Tensor, gives: Callable[[], torch.Tensor]) -> Any:
        total = torch.empty_like(residual)
        inverses = kernels.norm(residual, weight, eps, out, delta=delta, total=total, place=place)
        ctx.save_for_backward(total, weight, inverses, place)
        ctx.gives = gives
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, passed: torch.Tensor | None, given: torch.Tensor) -> Any:  # type: ignore[override]
        total, weight, inverses, place = ctx.saved_tensors
        dx, share = kernels.norm_gradients(given.contiguous(), total, weight, inverses, place=place, out=ctx.gives(),
                                           passed=None if passed is None else passed.contiguous())
        return dx, dx, share, None, None, None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of gate and up side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        kernels.swiglu(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kernels.swiglu_gradient(given.contiguous(), x)
        return x, None


class _Rows(torch.autograd.Function):
    """Rows [R] of x [N, H], each at most once, in out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = len(x)
        return torch.index_select(x, 0, rows, out=out)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return given.new_zeros(ctx.tokens, given.shape[1]).index_copy_(0, rows, given), None, None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        losses, *sums = kernels.divergence(logits, targets, places)
        ctx.save_for_backward(logits, targets, places, *sums)
        return losses

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        logits, targets, places, *sums = ctx.saved_tensors
        kernels.divergence_gradient(given.contiguous(), logits, targets, places, *sums)
        return logits, None, None
