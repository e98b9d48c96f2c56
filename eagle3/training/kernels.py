"""Fused GPU kernels of a training step: one pass over memory where torch makes a dozen.

A drafter of one layer spends a third of its step in such passes (norms, RoPE, the loss, the diagonals of attention).
Every function here has its plain form in ttt.py, which says what is computed; CPUs and float32 use that.
They compute in float32 and round once. Sums are taken in a fixed order: the same input gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_HEADS = 16  # heads that one program works on


@triton.jit
def _norm_forward(x, weight, out, inverses, hidden, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(x + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(out + row * hidden + columns, values * inverse * weights, mask=inside)
    tl.store(inverses + row, inverse)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    gradient, x, weight, inverses, dx, dweight, rows, hidden, BLOCK: tl.constexpr
):
    program, programs, columns = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = columns < hidden
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shares = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program + turn * programs
        at = row * hidden + columns
        given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        shares += given * normed
        given *= weights
        tl.store(dx + at, (given - normed * (tl.sum(given * normed, 0) / hidden)) * inverse, mask=inside)
    tl.store(dweight + program * hidden + columns, shares, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        rows, hidden = x.shape
        out, inverses = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        _norm_forward[(rows,)](x, weight, out, inverses, hidden, eps, **_whole_row(hidden))
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, inverses = ctx.saved_tensors
        rows, hidden = x.shape
        programs = min(rows, 2 * torch.cuda.get_device_properties(x.device).multi_processor_count)
        dx, dweight = torch.empty_like(x), torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        _norm_backward[(programs,)](gradient.contiguous(), x, weight, inverses, dx, dweight, rows, hidden,
                                    **_whole_row(hidden))
        return dx, dweight.sum(0).to(weight.dtype), None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of rows x [N, H], in the dtype of x whatever that of weight [H] is."""
    return _Norm.apply(x, weight, eps)  # type: ignore[no-any-return]


@triton.jit
def _rotation(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, half, scale, sign, HEADS: tl.constexpr, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    at = (row * heads + head)[:, None] * (2 * half) + column[None, :]
    cosine = tl.load(cos + row * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :] * scale
    sine = tl.load(sin + row * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :] * scale * sign
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, first * cosine - second * sine, mask=inside)
    tl.store(out + at + half, second * cosine + first * sine, mask=inside)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, sign: float) -> torch.Tensor:
    x = x.contiguous()
    rows, heads, size = x.shape
    out = torch.empty_like(x)
    _rotation[(rows, triton.cdiv(heads, _HEADS))](x, cos, sin, out, heads, size // 2, scale, sign, HEADS=_HEADS,
                                                 HALF=triton.next_power_of_2(size // 2))
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.scale = scale
        return _rotated(x, cos, sin, scale, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, ctx.scale, -1.0), None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return x [N, heads, d] under RoPE, times scale; cos and sin are [N, d] with equal halves."""
    return _Rotate.apply(x, cos, sin, scale)  # type: ignore[no-any-return]


@triton.jit
def _divergence(  # type: ignore[no-untyped-def]
    logits, targets, places, losses, gradient, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    gradient += row * vocab
    targets += tl.load(places + row) * vocab
    low = -1e30  # not -inf: differences of two stay numbers
    highest, wanted_highest = tl.full([BLOCK], low, tl.float32), tl.full([BLOCK], low, tl.float32)
    total, wanted_total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):  # of each lane, then of the row
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < vocab, other=low).to(tl.float32)
        higher = tl.maximum(highest, values)
        total = total * tl.exp(highest - higher) + tl.exp(values - higher)
        highest = higher
        values = tl.load(targets + columns, mask=columns < vocab, other=low).to(tl.float32)
        higher = tl.maximum(wanted_highest, values)
        wanted_total = wanted_total * tl.exp(wanted_highest - higher) + tl.exp(values - higher)
        wanted_highest = higher
    top, wanted_top = tl.max(highest, 0), tl.max(wanted_highest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    wanted_lse = wanted_top + tl.log(tl.sum(wanted_total * tl.exp(wanted_highest - wanted_top), 0))
    loss = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        log_q = tl.load(logits + columns, mask=columns < vocab, other=low).to(tl.float32) - lse
        log_p = tl.load(targets + columns, mask=columns < vocab, other=low).to(tl.float32) - wanted_lse
        p = tl.exp(log_p)
        loss += p * (log_p - log_q)
        tl.store(gradient + columns, tl.exp(log_q) - p, mask=columns < vocab)
    tl.store(losses + row, tl.sum(loss, 0))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        gradient = torch.empty_like(logits)
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        _divergence[(rows,)](logits, targets.contiguous(), places.contiguous(), losses, gradient, vocab, BLOCK=4096,
                             num_warps=8)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return torch.mul(gradient, given[:, None], out=torch.empty_like(gradient)), None, None


def divergence(logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return KL(target || draft) [N] in float32 of draft logits [N, D] and the rows `places` [N] of target logits
    [S, D]. The gradient, softmax less target, is made in the same pass."""
    return _Divergence.apply(logits, targets, places)  # type: ignore[no-any-return]


@triton.jit
def _merge_forward(  # type: ignore[no-untyped-def]
    query, key, value, out, lse, kv_heads, group, size, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    kv, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    inside = (kv < kv_heads)[:, None] & (column < size)[None, :]
    own = (row * kv_heads + kv)[:, None] * size + column[None, :]
    keys = tl.load(key + own, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + own, mask=inside, other=0.0).to(tl.float32)
    for member in range(group):
        head = (row * kv_heads + kv) * group + member
        at = head[:, None] * size + column[None, :]
        score = tl.sum(tl.load(query + at, mask=inside, other=0.0).to(tl.float32) * keys, 1)
        before = tl.load(lse + head, mask=kv < kv_heads, other=0.0)
        high = tl.maximum(before, score)
        after = high + tl.log(tl.exp(before - high) + tl.exp(score - high))
        merged = tl.load(out + at, mask=inside, other=0.0) * tl.exp(before - after)[:, None]
        tl.store(out + at, merged + values * tl.exp(score - after)[:, None], mask=inside)
        tl.store(lse + head, after, mask=kv < kv_heads)


@triton.jit
def _merge_backward(  # type: ignore[no-untyped-def]
    gradient, query, out, key, value, lse, dquery, dkey, dvalue, kv_heads, group, size, HEADS: tl.constexpr,
    SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    kv, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    inside = (kv < kv_heads)[:, None] & (column < size)[None, :]
    own = (row * kv_heads + kv)[:, None] * size + column[None, :]
    keys = tl.load(key + own, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + own, mask=inside, other=0.0).to(tl.float32)
    dkeys, dvalues = tl.zeros([HEADS, SIZE], tl.float32), tl.zeros([HEADS, SIZE], tl.float32)
    for member in range(group):
        head = (row * kv_heads + kv) * group + member
        at = head[:, None] * size + column[None, :]
        queries = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        outs = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(queries * keys, 1) - tl.load(lse + head, mask=kv < kv_heads, other=0.0))
        dscore = weight * tl.sum(given * (values - outs), 1)
        dkeys += dscore[:, None] * queries
        dvalues += weight[:, None] * given
        tl.store(dquery + at, tl.load(dquery + at, mask=inside, other=0.0) + dscore[:, None] * keys, mask=inside)
    tl.store(dkey + own, dkeys, mask=inside)
    tl.store(dvalue + own, dvalues, mask=inside)


def merge(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Add one more key and value of each row to its attention, in place.

    Args:
        query: [R, heads, d], scaled. key, value: [R, KV heads, d].
        out: [R, heads, d] float32, the attention so far. lse: [R, heads] float32, its log-sum-exp.
    All but key and value are contiguous.
    """
    grid, shape = _tiles(query, key)
    _merge_forward[grid](query, key.contiguous(), value.contiguous(), out, lse, *shape[:3], **shape[3])


def merge_gradients(
    gradient: torch.Tensor, query: torch.Tensor, out: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    lse: torch.Tensor, dquery: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a merged key and value, and add its share to dquery [R, heads, d] float32.

    Args:
        gradient, out: of the whole attention, [R, heads, d]. lse: of the whole row, [R, heads] float32.
    All but key and value are contiguous.
    """
    grid, shape = _tiles(query, key)
    key, value = key.contiguous(), value.contiguous()
    dkey, dvalue = torch.empty_like(key), torch.empty_like(value)
    _merge_backward[grid](gradient, query, out, key, value, lse, dquery, dkey, dvalue, *shape[:3], **shape[3])
    return dkey, dvalue


def _tiles(query: torch.Tensor, key: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int, int, dict[str, int]]]:
    rows, kv_heads, size = key.shape
    return (rows, triton.cdiv(kv_heads, _HEADS)), (kv_heads, query.shape[1] // kv_heads, size, {
        "HEADS": _HEADS, "SIZE": triton.next_power_of_2(size)})


def _whole_row(hidden: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
