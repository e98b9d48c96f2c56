"""A training step's forward and backward on a GPU in bf16: few passes over memory between the matrix products.

What is computed is ttt.py's; how, is this. Products of q, k and v, and of gate and up, are one each (products.py). What
embeddings contribute to q, k and v at a step is what they contributed a row further on at the step before, so it is
computed once. What lies between two products is one kernel, and works in place where nobody reads its input again: so a
backward pass can be taken once only, as training does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from eagle3.training import attention_kernels, kernels
from eagle3.training.attention import Layout, flash
from eagle3.training.batches import Batch
from eagle3.training.products import Product, Reader, in_half


def logits_by_step(model: Any, batch: Batch, steps: int, fp8: bool = False) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the draft logits [N, D] of the rows that are judged there; `fp8`: float8.py says which
    products are in float8."""
    layer, own, mlp = model.layers[0], model.layers[0].self_attn, model.layers[0].mlp
    layout, rows = Layout.of(batch.spans, batch.ids.device), [len(batch.rows)] * steps
    attending = [own.q_proj, own.k_proj, own.v_proj]
    weights = in_half(*(module.weight for module in attending))
    qkv = Reader(attending, weights, rows, model, batch.ids[batch.rows], fp8=fp8)
    fc = Product([model.fc], [rows[0], len(layout.context)])
    o, down = Product([own.o_proj], rows, fp8=fp8), Product([mlp.down_proj], rows, fp8=fp8)
    gate_up = Product([mlp.gate_proj, mlp.up_proj], rows, fp8=fp8)
    head = Product([model.lm_head], [len(judged) for judged, _ in batch.judged[:steps]])
    scales = own.head_dim**-0.5, 1.0, None

    def read(part: Reader, hidden: torch.Tensor, step: int, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, hidden = _norm(hidden, layer.hidden_norm, part.inputs(step))
        return (hidden, *part.heads(normed, step, _rope(model, positions), scales[3 - len(part.weights) :]))

    residual = fc(torch.index_select(batch.aux, 0, batch.rows, out=fc.inputs(0)), 0)
    residual, query, keys, values = read(qkv, residual, 0, batch.positions[batch.rows])
    if len(layout.context):  # prompts: keys and values alone
        hidden = fc(torch.index_select(batch.aux, 0, layout.context, out=fc.inputs(1)), 1)
        weights = weights[len(own.q_proj.weight) :]
        context = Reader(attending[1:], weights, [len(layout.context)], model, batch.ids[layout.context], fp8=fp8)
        _, *others = read(context, hidden, 0, batch.positions[layout.context])
        keys, values = (_Woven.apply(*pair, layout) for pair in zip((keys, values), others, strict=True))
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        if step:
            residual, query, key, value = read(qkv, residual, step, batch.positions[batch.rows] + step)
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


def _norm(hidden: torch.Tensor, module: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of hidden [N, H], in out, and hidden itself for what else needs it."""
    return _Norm.apply(hidden, module.weight, module.variance_epsilon, out)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    """A norm beside a residual stream."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> Any:
        ctx.save_for_backward(hidden, weight, kernels.norm(hidden, weight, eps, out))
        ctx.set_materialize_grads(False)
        return out, hidden

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, inverses = ctx.saved_tensors
        dx, share = kernels.norm_gradients(given.contiguous(), hidden, weight, inverses,
                                           passed=None if passed is None else passed.contiguous())
        return dx, share, None, None


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


class _Woven(torch.autograd.Function):
    """Keys or values of rows [R, heads, d] and context [C, heads, d] in the order of the text."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, context: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        place = torch.empty(len(rows) + len(context), dtype=torch.int64, device=rows.device)
        place[torch.cat([layout.rows, layout.others])] = torch.arange(len(place), device=rows.device)
        return torch.cat([rows, context])[place]

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        return given[ctx.layout.rows], given[ctx.layout.others], None


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
