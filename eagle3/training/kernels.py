"""Fused GPU kernels of a training step: one pass over memory where torch makes a dozen.

A drafter of one layer spends a third of its step in such passes (norms, RoPE, the loss, the diagonals of attention).
fused.py puts them together with the matrix products; the plain form of all of it is ttt.py, which CPUs and float32 use.
They compute in float32 and round once. Sums are taken in a fixed order: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl

_HEADS = 16  # heads that one program works on
_BLOCK = 4096  # elements of a row that one program works on at a time


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    x, source, delta, total, weight, out, place, inverses, hidden, out_stride, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    start = row if source is None else tl.load(source + row)
    values = tl.load(x + start * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        values += tl.load(delta + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * hidden + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(inverses + row, inverse)
    to = row if place is None else tl.load(place + row)
    tl.store(out + to * out_stride + columns, values * inverse * weights, mask=inside & (to >= 0))


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    gradient, place, x, source, passed, weight, inverses, dx, dweight, rows, hidden, stride, BLOCK: tl.constexpr
):
    program, programs, columns = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = columns < hidden
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shares = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program + turn * programs
        start = row if source is None else tl.load(source + row)
        at = row if place is None else tl.load(place + row)
        given = tl.load(gradient + at * stride + columns, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        normed = tl.load(x + start * hidden + columns, mask=inside, other=0.0).to(tl.float32) * inverse
        shares += given * normed
        if dx is not None:
            given *= weights
            change = (given - normed * (tl.sum(given * normed, 0) / hidden)) * inverse
            if passed is not None:
                change += tl.load(passed + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + row * hidden + columns, change, mask=inside)
    tl.store(dweight + program * hidden + columns, shares, mask=inside)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, source: torch.Tensor | None = None,
    delta: torch.Tensor | None = None, total: torch.Tensor | None = None, place: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the RMS norm of N rows to out; return the inverse root mean squares [N] float32.

    Args:
        x: [N, H]; with source [N] int64 any table, of which row k is row source[k].
        delta: [N, H], added to x first; the sum is written to total.
        out: [N, H], rows of any stride; with place [N] int64 row k goes to row place[k], and nowhere if that is -1.
    """
    rows, hidden = (len(source) if source is not None else len(x)), x.shape[1]
    inverses = torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_forward[(rows,)](x, source, delta, total, weight, out, place, inverses, hidden, out.stride(0), eps,
                           **_whole_row(hidden))
    return inverses


def norm_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverses: torch.Tensor, *,
    source: torch.Tensor | None = None, place: torch.Tensor | None = None, passed: torch.Tensor | None = None,
    out: torch.Tensor | None = None, inputs: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gradients of `norm` with respect to x, in out (plus `passed` [N, H], what x gets from elsewhere; None
    without inputs), and to the weight [H]. x is what was normed, delta included; gradient has rows of any stride."""
    rows, hidden = len(inverses), x.shape[1]
    programs = min(rows, 2 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    dx = out if out is not None or not inputs else x.new_empty(rows, hidden)
    dweight = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](gradient, place, x, source, passed, weight, inverses, dx, dweight, rows, hidden,
                                gradient.stride(0), **_whole_row(hidden))
    return dx, dweight.sum(0).to(weight.dtype)


@triton.jit
def _rotation(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, half, x_stride, out_stride, scale, sign, HEADS: tl.constexpr, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    at = head[:, None] * (2 * half) + column[None, :]
    cosine = tl.load(cos + row * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :] * scale
    sine = tl.load(sin + row * 2 * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :] * scale * sign
    first = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, first * cosine - second * sine, mask=inside)
    tl.store(out + row * out_stride + at + half, second * cosine + first * sine, mask=inside)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, out: torch.Tensor, *, back: bool = False
) -> None:
    """Write x [N, heads, d] under RoPE, times scale, to out, which may be x; `back`: the gradient of that.

    cos and sin are [N, d] with equal halves, contiguous; rows of x and out may have any stride.
    """
    rows, heads, size = x.shape
    _rotation[(rows, triton.cdiv(heads, _HEADS))](
        x, cos, sin, out, heads, size // 2, x.stride(0), out.stride(0), scale, -1.0 if back else 1.0, HEADS=_HEADS,
        HALF=triton.next_power_of_2(size // 2))


@triton.jit
def _shifted_sum(x, out, rows, steps, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        inside = (columns < width) & (row >= step)
        total += tl.load(x + (step * rows + row - step) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total, mask=columns < width)


def shifted_sum(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Return [R, F] whose row r is the sum over steps s of row r - s of the s-th of the [R, F] one behind the other in
    x."""
    rows, width = len(x) // steps, x.shape[1]
    out = x.new_empty(rows, width)
    _shifted_sum[(rows, triton.cdiv(width, _BLOCK))](x, out, rows, steps, width, BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit
def _swiglu(x, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(gradient, x, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    given = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(x + row * 2 * width + columns, given * up * share * (1 + gate * (1 - share)), mask=inside)
    tl.store(x + row * 2 * width + width + columns, given * gate * share, mask=inside)


def swiglu(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(gate) * up of x [N, 2F], gate and up side by side, to out [N, F]."""
    rows, width = out.shape
    _swiglu[(rows, triton.cdiv(width, _BLOCK))](x, out, width, BLOCK=_BLOCK, num_warps=8)


def swiglu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> None:
    """Put the gradient of `swiglu` with respect to x in the place of x."""
    rows, width = gradient.shape
    _swiglu_backward[(rows, triton.cdiv(width, _BLOCK))](gradient, x, width, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _divergence(  # type: ignore[no-untyped-def]
    logits, targets, places, losses, lse, wanted_lse, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    targets += tl.load(places + row) * vocab
    low = -1e30  # not -inf: differences of two stay numbers
    top, wanted_top = tl.full([], low, tl.float32), tl.full([], low, tl.float32)
    total, wanted_total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    gap = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < vocab, other=low).to(tl.float32)
        wanted = tl.load(targets + columns, mask=columns < vocab, other=low).to(tl.float32)
        higher = tl.maximum(top, tl.max(values, 0))
        total = total * tl.exp(top - higher) + tl.exp(values - higher)
        top = higher
        higher = tl.maximum(wanted_top, tl.max(wanted, 0))
        shrink, share = tl.exp(wanted_top - higher), tl.exp(wanted - higher)
        wanted_total = wanted_total * shrink + share
        gap = gap * shrink + share * (wanted - values)
        wanted_top = higher
    own = top + tl.log(tl.sum(total, 0))
    theirs = tl.sum(wanted_total, 0)
    difference = tl.sum(gap, 0) / theirs  # the mean of target less draft logit
    theirs = wanted_top + tl.log(theirs)
    tl.store(losses + row, difference - (theirs - own))
    tl.store(lse + row, own)
    tl.store(wanted_lse + row, theirs)


@triton.jit
def _divergence_backward(  # type: ignore[no-untyped-def]
    given, logits, targets, places, lse, wanted_lse, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    target = tl.load(places + row)
    values = tl.load(logits + row * vocab + columns, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.load(targets + target * vocab + columns, mask=inside, other=0.0).to(tl.float32)
    change = tl.exp(values - tl.load(lse + row)) - tl.exp(wanted - tl.load(wanted_lse + row))
    tl.store(logits + row * vocab + columns, change * tl.load(given + row), mask=inside)


def divergence(
    logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return KL(target || draft) [N] in float32 of draft logits [N, D] and the rows `places` [N] of target logits
    [S, D], and the log-sum-exps [N] of both. All are contiguous."""
    rows, vocab = logits.shape
    losses, lse, wanted_lse = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _divergence[(rows,)](logits, targets, places, losses, lse, wanted_lse, vocab, BLOCK=_BLOCK, num_warps=8)
    return losses, lse, wanted_lse


def divergence_gradient(
    given: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor, lse: torch.Tensor,
    wanted_lse: torch.Tensor,
) -> None:
    """Put the gradient of `divergence`, draft less target probability times given [N], in the place of the logits."""
    rows, vocab = logits.shape
    _divergence_backward[(rows, triton.cdiv(vocab, _BLOCK))](given, logits, targets, places, lse, wanted_lse, vocab,
                                                             BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, half, factor, size, rate, shrink, blend, keep, blend_square, eps, root, seed,
    BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(factor)
    inside = (at < size) & (scale > 0)
    given = tl.load(gradient + at, mask=inside, other=0.0) * scale
    first = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(weight + at, mask=inside, other=0.0)
    first += blend * (given - first)
    second = keep * second + blend_square * given * given
    value -= value * shrink
    value -= rate * first / (tl.sqrt(second) / root + eps)
    if seed is not None:  # the nearest two of bf16, the nearer the likelier
        noise = tl.randint(seed, at.to(tl.int32)).to(tl.int32, bitcast=True)
        first = ((first.to(tl.int32, bitcast=True) + (noise & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
        second = ((second.to(tl.int32, bitcast=True) + ((noise >> 16) & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    tl.store(mean + at, first, mask=inside)
    tl.store(square + at, second, mask=inside)
    tl.store(weight + at, value, mask=inside)
    if half is not None:
        tl.store(half + at, value, mask=inside)


def adamw(
    weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, half: torch.Tensor | None,
    factor: torch.Tensor, step: int, rate: float, betas: tuple[float, float], eps: float, decay: float,
    seed: int | None = None,
) -> None:
    """Do step `step` (from 1) of AdamW in place, all tensors float32; half, if there is one, gets the weight in bf16.

    Args:
        seed: of the stochastic rounding of moments in bf16; None: they are float32.
        factor: [] float32 on the GPU, by which the gradient is multiplied; with 0 nothing is changed.
    """
    size = weight.numel()
    root = (1 - betas[1] ** step) ** 0.5
    _adamw[(triton.cdiv(size, 2048),)](
        weight, gradient, mean, square, half, factor, size, rate / (1 - betas[0] ** step), rate * decay, 1 - betas[0],
        betas[1], 1 - betas[1], eps, root, seed, BLOCK=2048, num_warps=8)


def _whole_row(hidden: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _to_float8(x, out, scales, columns, stride, LARGEST, LEAST, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        given = tl.load(x + row * stride + start + offsets, mask=start + offsets < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(given))
    scale = tl.maximum(tl.max(largest, 0), LEAST) / LARGEST
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        given = tl.load(x + row * stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * columns + start + offsets, (given / scale).to(out.dtype.element_ty), mask=inside)


def to_float8(x: torch.Tensor, form: torch.dtype, largest: float, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of x [N, K] in a float8 form whose largest value is given, and the scale [N, 1] float32 of each.

    Args:
        x: contiguous within a row. least: what the largest value of a row is taken for at least.
    """
    assert x.stride(1) == 1
    out = torch.empty(x.shape, dtype=form, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(x.shape[1]))
    _to_float8[(len(x),)](x, out, scales, x.shape[1], x.stride(0), largest, least, BLOCK=block, num_warps=8)
    return out, scales
