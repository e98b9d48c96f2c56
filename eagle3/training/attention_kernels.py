"""Fused GPU kernels of the drafts' share in attention: a key and a value of each row, merged by log-sum-exp.

Their plain forms are in attention.py. They compute in float32 and round once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_HEADS = 16  # KV heads that one program works on


@triton.jit
def _merge_forward(  # type: ignore[no-untyped-def]
    query, key, value, before, out, lse, kv_heads, group, size, query_stride, key_stride, value_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    kv, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    inside = (kv < kv_heads)[:, None] & (column < size)[None, :]
    own = kv[:, None] * size + column[None, :]
    keys = tl.load(key + row * key_stride + own, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + row * value_stride + own, mask=inside, other=0.0).to(tl.float32)
    for member in range(group):
        head = kv * group + member
        within = head[:, None] * size + column[None, :]
        at, entry = row * kv_heads * group * size + within, row * kv_heads * group + head
        score = tl.sum(tl.load(query + row * query_stride + within, mask=inside, other=0.0).to(tl.float32) * keys, 1)
        old = tl.load(lse + entry, mask=kv < kv_heads, other=0.0)
        high = tl.maximum(old, score)
        after = high + tl.log(tl.exp(old - high) + tl.exp(score - high))
        merged = tl.load(before + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(old - after)[:, None]
        tl.store(out + at, merged + values * tl.exp(score - after)[:, None], mask=inside)
        tl.store(lse + entry, after, mask=kv < kv_heads)


@triton.jit
def _merge_backward(  # type: ignore[no-untyped-def]
    gradient, query, out, key, value, lse, before, dquery, dkey, dvalue, kv_heads, group, size, query_stride,
    key_stride, value_stride, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    kv, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    inside = (kv < kv_heads)[:, None] & (column < size)[None, :]
    own = kv[:, None] * size + column[None, :]
    keys = tl.load(key + row * key_stride + own, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(value + row * value_stride + own, mask=inside, other=0.0).to(tl.float32)
    dkeys, dvalues = tl.zeros([HEADS, SIZE], tl.float32), tl.zeros([HEADS, SIZE], tl.float32)
    for member in range(group):
        head = kv * group + member
        within = head[:, None] * size + column[None, :]
        at, entry = row * kv_heads * group * size + within, row * kv_heads * group + head
        queries = tl.load(query + row * query_stride + within, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        outs = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(queries * keys, 1) - tl.load(lse + entry, mask=kv < kv_heads, other=0.0))
        dscore = weight * tl.sum(given * (values - outs), 1)
        dkeys += dscore[:, None] * queries
        dvalues += weight[:, None] * given
        old = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dquery + at, old + dscore[:, None] * keys, mask=inside)
    tl.store(dkey + row * kv_heads * size + own, dkeys, mask=inside)
    tl.store(dvalue + row * kv_heads * size + own, dvalues, mask=inside)


def merge(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: torch.Tensor, lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write attention with one more key and value of each row in it to out [R, heads, d].

    Args:
        query: [R, heads, d], scaled. key, value: [R, KV heads, d]. Their rows may have any stride.
        before: [R, heads, d], the attention so far, contiguous as out is.
        lse: [R, heads] float32, its log-sum-exp, which is updated.
    """
    grid, shape = _tiles(query, key)
    _merge_forward[grid](query, key, value, before, out, lse, *shape, query.stride(0), key.stride(0), value.stride(0),
                         **_blocks(key))


def merge_gradients(
    gradient: torch.Tensor, query: torch.Tensor, out: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    lse: torch.Tensor, before: torch.Tensor, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of the query so far, `before` [R, heads, d], plus a merged pair's share, in dtype; and the
    gradients of its key and value.

    Args:
        gradient, out: of the whole attention, [R, heads, d], contiguous. lse: of the whole row, [R, heads] float32.
    """
    dquery = torch.empty_like(before, dtype=dtype)
    dkey, dvalue = (torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2))
    grid, shape = _tiles(query, key)
    _merge_backward[grid](gradient, query, out, key, value, lse, before, dquery, dkey, dvalue, *shape, query.stride(0),
                          key.stride(0), value.stride(0), **_blocks(key))
    return dquery, dkey, dvalue


def _tiles(query: torch.Tensor, key: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int, int]]:
    rows, kv_heads, size = key.shape
    return (rows, triton.cdiv(kv_heads, _HEADS)), (kv_heads, query.shape[1] // kv_heads, size)


def _blocks(key: torch.Tensor) -> dict[str, Any]:
    return {"HEADS": _HEADS, "SIZE": triton.next_power_of_2(key.shape[2])}
