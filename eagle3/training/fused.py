"""A training step's forward and backward on a GPU in bf16: few passes over memory between the matrix products.

What is computed is ttt.py's; how, is this: products of q, k and v, and of gate and up, are one each, over copies of
the weights in bf16 that the optimizer keeps up to date; gradients of weights are added up in float32 by the products
themselves; what lies between two products is one kernel, and works in place where nobody reads its input again. So
a backward pass can be taken once only, as training does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from eagle3.training import attention_kernels, kernels
from eagle3.training.attention import Layout, flash
from eagle3.training.batches import Batch


def logits_by_step(model: Any, batch: Batch, steps: int) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the draft logits [N, D] of the rows that are judged there."""
    layer, own = model.layers[0], model.layers[0].self_attn
    layout = Layout.of(batch.spans, batch.ids.device)
    projections = [own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]
    copy, scales = in_half(*projections), (own.head_dim**-0.5, 1.0, None)
    mlp = [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
    gate_up = in_half(*mlp)

    def project(inputs: torch.Tensor, positions: torch.Tensor, which: slice) -> list[torch.Tensor]:
        cos, sin = (part[0] for part in model.rotary_emb(inputs[None], positions[None]))
        sizes = [len(weight) for weight in projections]
        begin, end = sum(sizes[: which.start]), sum(sizes[: which.stop])
        return list(_Project.apply(inputs, copy[begin:end], cos.contiguous(), sin.contiguous(), own.head_dim,
                                   scales[which], *projections[which]))

    residual = _linear(batch.aux[layout.tokens], model.fc.weight)
    inputs, residual = _layer_input(model, batch.ids[layout.tokens], residual)
    positions = batch.positions[batch.rows]
    if layout.rows is None:
        query, keys, values = project(inputs, positions, slice(0, 3))
    else:
        keys, values = project(inputs, batch.positions[layout.tokens], slice(1, 3))
        inputs, residual = (_Rows.apply(tensor, layout.rows) for tensor in (inputs, residual))
        (query,) = project(inputs, positions, slice(0, 1))
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        if step:
            # rows past the end of their text read a wrong token; they carry no loss at this step
            ids = batch.ids[(batch.rows + step).clamp(max=len(batch.ids) - 1)]
            inputs, residual = _layer_input(model, ids, residual)
            query, key, value = project(inputs, positions + step, slice(0, 3))
            drafted.append((key, value))
        attended = flash(query, keys, values, drafted, layout, attention_kernels)
        residual, inputs = _add_norm(
            residual, _linear(attended.flatten(1), own.o_proj.weight), layer.post_attention_layernorm)
        mixed = _SwiGLU.apply(_Linear.apply(inputs, gate_up, *mlp))
        residual, hidden = _add_norm(
            residual, _linear(mixed, layer.mlp.down_proj.weight), model.norm, batch.judged[step][0])
        yield _linear(hidden, model.lm_head.weight)


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


def _weight_gradient(weight: torch.Tensor, given: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Add given.T @ x to the gradient of a float32 weight, in float32; return it for a bf16 one."""
    if not weight.requires_grad:
        return None
    if weight.dtype != torch.float32:
        return given.T @ x
    if weight.grad is None:
        weight.grad = torch.mm(given.T, x, out_dtype=torch.float32)
    else:
        torch.ops.aten.addmm.dtype_out(weight.grad, given.T, x, torch.float32, out=weight.grad)
    return None


def _weight_gradients(weights: Any, given: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor | None]:
    parts = given.split([len(weight) for weight in weights], 1)
    return [_weight_gradient(weight, part, x) for weight, part in zip(weights, parts, strict=True)]


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _Linear.apply(x, in_half(weight), weight)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """x [N, i] times weights [o, i], one behind the other; `copy` is them in bf16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, copy)
        ctx.weights = weights
        return x @ copy.T

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        x, copy = ctx.saved_tensors
        dx = given @ copy if ctx.needs_input_grad[0] else None
        return (dx, None, *_weight_gradients(ctx.weights, given, x))


class _Project(torch.autograd.Function):
    """_Linear into heads, those with a scale under RoPE: a tensor [N, heads, d] of each weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int,
                scales: tuple[float | None, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, copy, cos, sin)
        ctx.weights, ctx.scales = weights, scales
        parts = (x @ copy.T).unflatten(1, (-1, size)).split([len(weight) // size for weight in weights], 1)
        for part, scale in zip(parts, scales, strict=True):
            if scale is not None:
                kernels.rotate(part, cos, sin, scale, part)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        x, copy, cos, sin = ctx.saved_tensors
        gradient = x.new_empty(len(x), len(copy))
        parts = gradient.unflatten(1, (-1, given[0].shape[2])).split([part.shape[1] for part in given], 1)
        for part, own, scale in zip(given, parts, ctx.scales, strict=True):
            if scale is None:
                own.copy_(part)
            else:
                kernels.rotate(part.contiguous(), cos, sin, scale, own, back=True)
        dx = gradient @ copy if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, None, *_weight_gradients(ctx.weights, gradient, x))


# --- between the products ---------------------------------------------------------------------------------


def _layer_input(model: Any, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what q, k and v read, [N, 2H], normed embedding and normed hidden state side by side; and hidden."""
    layer = model.layers[0]
    norms = layer.input_layernorm, layer.hidden_norm
    return _LayerInput.apply(model.embed_tokens.weight.detach(), ids, hidden,  # type: ignore[no-any-return]
                             *(module.weight for module in norms), *(module.variance_epsilon for module in norms))


class _LayerInput(torch.autograd.Function):
    """The norms of embedding and hidden state, and the hidden state itself for what else needs it."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, *norms: Any) -> Any:
        embedding_weight, hidden_weight, *eps = norms
        out = hidden.new_empty(len(hidden), 2 * hidden.shape[1])
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
        return None, None, dhidden, left_share, right_share, None, None


def _add_norm(residual: torch.Tensor, delta: torch.Tensor, module: Any, rows: torch.Tensor | None = None) -> Any:
    """Return residual + delta [N, H] and its norm, of `rows` [M] only if given (each at most once)."""
    place = None
    if rows is not None and len(rows) < len(residual):
        place = torch.full((len(residual),), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
    count = len(residual) if place is None else len(rows)  # type: ignore[arg-type]
    return _AddNorm.apply(residual, delta, module.weight, module.variance_epsilon, place, count)


class _AddNorm(torch.autograd.Function):
    """A sum and the norm of it."""

    @staticmethod
    def forward(ctx: Any, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float,
                place: torch.Tensor | None, count: int) -> Any:
        total, out = torch.empty_like(residual), residual.new_empty(count, residual.shape[1])
        inverses = kernels.norm(residual, weight, eps, out, delta=delta, total=total, place=place)
        ctx.save_for_backward(total, weight, inverses, place)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, passed: torch.Tensor | None, given: torch.Tensor) -> Any:  # type: ignore[override]
        total, weight, inverses, place = ctx.saved_tensors
        dx, share = kernels.norm_gradients(given.contiguous(), total, weight, inverses, place=place,
                                           passed=None if passed is None else passed.contiguous())
        return dx, dx, share, None, None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of gate and up side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return kernels.swiglu(x)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        kernels.swiglu_gradient(given.contiguous(), x)
        return x


class _Rows(torch.autograd.Function):
    """Rows [R] of x [N, H], each at most once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = len(x)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        return given.new_zeros(ctx.tokens, given.shape[1]).index_copy_(0, rows, given), None


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
