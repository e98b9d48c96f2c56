"""Attention of a drafter over true tokens (a triangle) and over its own drafts (a diagonal for each step)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Spans = list[tuple[int, int, int]]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    drafted: list[tuple[torch.Tensor, torch.Tensor]],
    spans: Spans,
) -> torch.Tensor:
    """Attention of one TTT step: each row sees its document's true tokens up to itself, and its own drafts.

    Args:
        query: [R, heads, d], scaled.
        keys, values: of the true tokens, [T, KV heads, d].
        drafted: keys and values [R, KV heads, d] of the steps since.
        spans: (start, first, stop) of each document: its tokens begin at start, its rows are first..stop - 1.
    Returns:
        [R, heads, d].
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        layout = Layout.of(spans, query.device)
        return flash(query, keys[layout.tokens], values[layout.tokens], drafted, layout)
    pieces, row = [], 0
    for start, first, stop in spans:
        count = stop - first
        own = [(key[row : row + count], value[row : row + count]) for key, value in drafted]
        pieces.append(attend_document(query[row : row + count], keys[start:stop], values[start:stop], own))
        row += count
    return torch.cat(pieces)


def attend_document(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, drafted: list[tuple[torch.Tensor, torch.Tensor]],
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `count` positions of a document, scores in memory: for short documents and CPUs.

    Args:
        seen: [count] int64, how many of the document's true tokens each of them sees; default: they are its last ones.
    """
    count, heads, size = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.view(count, kv_heads, heads // kv_heads, size)
    queries = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, size)  # [KV heads, group x count, d]
    scores = (queries @ keys.permute(1, 2, 0)).view(kv_heads, -1, count, length)
    places = torch.arange(length, device=query.device)
    future = places >= (places[length - count :] + 1 if seen is None else seen)[:, None]
    scores = scores.masked_fill(future, float("-inf"))
    diagonals = [(grouped * key[:, :, None]).sum(-1).permute(1, 2, 0)[..., None] for key, _ in drafted]
    weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    out = weights[..., :length].reshape(kv_heads, -1, length) @ values.permute(1, 0, 2)
    out = out.view(kv_heads, -1, count, size)
    for step, (_, value) in enumerate(drafted):
        out = out + weights[..., length + step, None] * value.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(count, heads, size)


@dataclass(frozen=True)
class Layout:
    """Where the documents of a batch lie on the GPU: what flash attention asks for.

    Attributes:
        tokens: [U] int64, the positions of the batch that are keys and values: of each document up to its last row.
        rows, others: [R] and [C] int64, where the rows, and those that are none, are among these.
        context: [C] int64, the positions of the latter in the batch.
        cumulative: rows and tokens before each document, two [documents + 1] int32.
        limits: most rows and most tokens in a document.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    others: torch.Tensor
    context: torch.Tensor
    cumulative: tuple[torch.Tensor, torch.Tensor]
    limits: tuple[int, int]

    @staticmethod
    def of(spans: Spans, device: torch.device) -> "Layout":
        """Return the layout of a batch's spans, without waiting for the GPU."""
        lengths = np.array([(0, 0), *((stop - first, stop - start) for start, first, stop in spans)])
        before = lengths.cumsum(0)
        tokens = np.concatenate([np.arange(start, stop) for start, _, stop in spans])
        drafting = np.concatenate([np.arange(start, stop) >= first for start, first, stop in spans])

        def moved(array: np.ndarray) -> torch.Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        return Layout(
            moved(tokens), moved(np.flatnonzero(drafting)), moved(np.flatnonzero(~drafting)), moved(tokens[~drafting]),
            (moved(before[:, 0].astype(np.int32)), moved(before[:, 1].astype(np.int32))),
            (int(lengths[:, 0].max()), int(lengths[:, 1].max())))


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
          drafted: list[tuple[torch.Tensor, torch.Tensor]], layout: Layout, kernels: Any = None,
          out: torch.Tensor | None = None) -> torch.Tensor:
    """Return what `attend` does, on a GPU, of keys and values [U, KV heads, d] of the layout's tokens.

    Args:
        kernels: eagle3.training.attention_kernels where Triton works.
        out: [R, heads x d], where the result is put.
    """
    flat = [tensor for pair in drafted for tensor in pair]
    return _Flash.apply(query, keys, values, layout, kernels, out, *flat)  # type: ignore[no-any-return]


def merge(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor, lse: torch.Tensor,
          out: torch.Tensor) -> None:
    """The plain form of attention_kernels.merge."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    score = (query.float() * key).sum(-1)
    after = torch.logaddexp(lse, score)
    out.copy_(before.float() * (lse - after).exp()[..., None] + (score - after).exp()[..., None] * value)
    lse.copy_(after)


def merge_gradients(
    gradient: torch.Tensor, query: torch.Tensor, out: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    lse: torch.Tensor, before: torch.Tensor, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plain form of attention_kernels.merge_gradients."""
    shape = key.shape[1], query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(shape[1], 1) for tensor in (key, value))
    weight = ((query.float() * keys).sum(-1) - lse).exp()
    dscore = (weight * (gradient.float() * (values.float() - out)).sum(-1))[..., None]
    dkey, dvalue = (share.unflatten(1, shape).sum(2).to(key.dtype)
                    for share in (dscore * query, weight[..., None] * gradient))
    return (before.float() + dscore * keys).to(dtype), dkey, dvalue


class _Flash(torch.autograd.Function):
    """Flash attention over the triangle, the diagonals merged in by log-sum-exp.

    Flash attention's backward recomputes probabilities from the log-sum-exp and takes its row terms from the
    output. Given those of the whole row, diagonals included, it returns the triangle's share of the gradients
    (as ring attention does with its blocks); the diagonals' share is a few products by hand.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, kernels: Any,
                out: torch.Tensor | None, *drafted: torch.Tensor) -> torch.Tensor:
        attended, lse, *random = torch.ops.aten._flash_attention_forward(
            query, keys, values, *layout.cumulative, *layout.limits, 0.0, True, False, scale=1.0)[:4]
        lse = lse.T.contiguous()
        out = torch.empty_like(attended) if out is None else out.view(attended.shape)
        for dtype, key, value in _pairs(query.dtype, drafted):
            merged = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
            (kernels.merge if kernels else merge)(query, key, value, attended, lse, merged)
            attended = merged
        if not drafted:
            out.copy_(attended)
        ctx.save_for_backward(query, keys, values, lse, out, *random, *drafted)
        ctx.layout, ctx.kernels = layout, kernels
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        query, keys, values, lse, out, state, unused, *drafted = ctx.saved_tensors
        gradient = gradient.contiguous()
        with _in_fixed_order():
            dquery, dkeys, dvalues = torch.ops.aten._flash_attention_backward(
                gradient, query, keys, values, out, lse.T.contiguous(), *ctx.layout.cumulative, *ctx.layout.limits, 0.0,
                True, state, unused, scale=1.0)
        own: list[torch.Tensor] = []
        gradients = ctx.kernels.merge_gradients if ctx.kernels else merge_gradients
        for dtype, key, value in _pairs(query.dtype, drafted):
            dquery, *pair = gradients(gradient, query, out, key, value, lse, dquery, dtype)
            own += pair
        return (dquery, dkeys, dvalues, None, None, None, *own)


def _pairs(last: torch.dtype, drafted: Any) -> Iterator[tuple[torch.dtype, torch.Tensor, torch.Tensor]]:
    """Yield each drafted key and value with the dtype of the sum with it: float32 until the last."""
    for place in range(0, len(drafted), 2):
        yield last if place == len(drafted) - 2 else torch.float32, drafted[place], drafted[place + 1]


@contextlib.contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Let flash attention add gradients up in a fixed order: it takes no longer, and equal inputs give equal bits."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # it costs passes over memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
