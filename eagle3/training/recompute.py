"""The fused step for long texts: the layer of each TTT step is computed again in the backward pass, not kept.

What is kept of a step are the stream that enters it, its keys and values, and the normed states that the head reads.
Each step has products of its own, whose weight gradients are added up one step after another, so sums are rounded
otherwise than in fused.py; nothing else differs. The head and the loss in chunks of rows are ttt.py's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from eagle3.training import attention_kernels, fused
from eagle3.training.attention import Layout, flash
from eagle3.training.batches import Batch
from eagle3.training.products import Product, Reader, in_half


def hidden_by_step(model: Any, batch: Batch, steps: int, fp8: bool = False) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the normed hidden states [N, H] of the rows that are judged there."""
    layout, rows = Layout.of(batch.spans, batch.ids.device), batch.rows
    fc = Product([model.fc], [len(rows), len(layout.context)])
    residual = fc(torch.index_select(batch.aux, 0, rows, out=fc.inputs(0)), 0)
    context: tuple[torch.Tensor, ...] = ()
    if len(layout.context):
        hidden = fc(torch.index_select(batch.aux, 0, layout.context, out=fc.inputs(1)), 1)
        context = checkpoint(_context, model, batch, layout, hidden, fp8, use_reentrant=True, preserve_rng_state=False)
    keys, drafted = context, list[torch.Tensor]()
    for step in range(steps):
        residual, normed, *pair = checkpoint(_step, model, batch, layout, fp8, step, residual, len(keys), *keys,
                                             *drafted, use_reentrant=True, preserve_rng_state=False)
        if step:
            drafted += pair
        else:
            keys = tuple(pair)
        yield normed


def head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the draft logits [N, D] of a chunk of normed states, whose gradient will be put in their place."""
    product = Product([model.lm_head], [len(hidden)])
    return product(hidden, 0, in_place=True)


def _context(model: Any, batch: Batch, layout: Layout, hidden: torch.Tensor, fp8: bool
             ) -> tuple[torch.Tensor, ...]:
    """Return keys and values [C, KV heads, d] of the positions that are no rows."""
    own = model.layers[0].self_attn
    weights = in_half(*(module.weight for module in (own.q_proj, own.k_proj, own.v_proj)))[len(own.q_proj.weight) :]
    part = Reader([own.k_proj, own.v_proj], weights, [len(layout.context)], model, batch.ids[layout.context],
                  fp8=fp8)
    _, *pair = _read(model, part, hidden, batch.positions[layout.context], (1.0, None))
    return tuple(pair)


def _step(model: Any, batch: Batch, layout: Layout, fp8: bool, step: int, residual: torch.Tensor, known: int,
          *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the stream [R, H] that leaves a step, the normed states [N, H] of the judged rows, and keys and values:
    of the first step those of the whole text, of a later one its own.

    Args:
        states: `known` keys and values of the text (before the first step of the positions that are no rows), then
            those of the drafts so far, one after the other.
    """
    layer, own, mlp = model.layers[0], model.layers[0].self_attn, model.layers[0].mlp
    attending, rows = [own.q_proj, own.k_proj, own.v_proj], [len(batch.rows)]
    ids = batch.ids[(batch.rows + step).clamp(max=len(batch.ids) - 1)]
    qkv = Reader(attending, in_half(*(module.weight for module in attending)), rows, model, ids,
                 fp8=fp8)
    o, down = Product([own.o_proj], rows, fp8=fp8), Product([mlp.down_proj], rows, fp8=fp8)
    gate_up = Product([mlp.gate_proj, mlp.up_proj], rows, fp8=fp8)
    residual, query, *pair = _read(model, qkv, residual, batch.positions[batch.rows] + step,
                                   (own.head_dim**-0.5, 1.0, None))
    drafted = [*states[known:], *pair] if step else []
    if step:
        keys = list(states[:known])
    else:
        keys = pair = [fused._Woven.apply(mine, theirs, layout) for mine, theirs in zip(pair, states, strict=True)] \
            if known else pair
    attended = flash(query, keys[0], keys[1], list(zip(drafted[::2], drafted[1::2], strict=True)), layout,
                     attention_kernels, o.inputs(0))
    residual, inputs = fused._add_norm(residual, o(attended.flatten(1), 0), layer.post_attention_layernorm,
                                       gate_up.inputs(0), gives=o.gradients(0))
    mixed = fused._SwiGLU.apply(gate_up(inputs, 0, in_place=True), down.inputs(0))
    judged = batch.judged[step][0]
    normed = down.copy.new_empty(len(judged), down.copy.shape[0])
    residual, normed = fused._add_norm(residual, down(mixed, 0), model.norm, normed, gives=down.gradients(0),
                                       rows=judged)
    return residual, normed, *pair


def _read(model: Any, part: Reader, hidden: torch.Tensor, positions: torch.Tensor, scales: tuple[float | None, ...]
          ) -> tuple[torch.Tensor, ...]:
    """Return hidden itself and what the matrices of `part` make of it, in heads."""
    normed, hidden = fused._norm(hidden, model.layers[0].hidden_norm, part.inputs(0))
    return (hidden, *part.heads(normed, 0, fused._rope(model, positions), scales))
