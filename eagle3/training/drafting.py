"""What a drafter drafts at every position of recorded text, each as far as its drafts are the text's own tokens.

An engine goes on from a draft only while drafts are accepted, so a position whose draft was wrong is dropped: the work
is that of the tokens which rounds can reach, not of all steps at all positions. Nothing is kept for a backward pass.
Products run in the precision of the weights; residual stream, norms, RoPE and attention in float32. Positions and
shifts are those of eagle3/training/batches.py, the layer that of ttt.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.drafter.teacher import TeacherHead
from eagle3.training import ttt
from eagle3.training.attention import attend_document
from eagle3.training.batches import Batch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_SCORES = {"cuda": 1 << 27, "cpu": 1 << 24}  # attention scores at once, float32
_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 23}  # of the verifier at once, float32


@dataclass(frozen=True)
class Sampling:
    """How tokens were drawn. top_k: 0 or less for all; top_p: 1 for all."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


@torch.inference_mode()
def draft(model: Any, batch: Batch, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft up to `depth` tokens from each supervised position of a batch on the model's device.

    Returns:
        tokens: [T, depth] int64 target ids, -1 where nothing was drafted. tokens[p, s] stands for token p + 2 + s.
        right: [T] int64, how many of a position's drafts, from the first on, are the text's own tokens. A draft beyond
            the generated text is not made.
    """
    layer, own = model.layers[0], model.layers[0].self_attn
    size, starts = own.head_dim, _starts(batch)
    hidden = _product(model.fc, ttt.normed_states(model, batch.aux))
    keys, values = _keys_and_values(model, batch.ids, batch.positions, hidden)
    tokens = torch.full((len(batch.ids), depth), -1, device=hidden.device)
    right = torch.zeros(len(batch.ids), dtype=torch.int64, device=hidden.device)
    rows = batch.mask.nonzero()[:, 0]
    hidden, drafted = hidden[rows], Pairs()
    for step in range(depth):
        ids, positions = batch.ids[rows + step], batch.positions[rows] + step
        if step:
            drafted.append(_keys_and_values(model, ids, positions, hidden))
        query = _heads(own.q_proj, ttt._layer_input(model, layer, ids, hidden), size)
        query = ttt._rotate(query, *_rotary(model, positions), size**-0.5)
        attended = _attend(query, keys, values, drafted, rows, starts)
        hidden = ttt.stream_of(model, hidden) + _product(own.o_proj, attended.flatten(1))
        hidden = hidden + _product(layer.mlp, layer.post_attention_layernorm(hidden), layer.mlp.down_proj.weight.dtype)
        normed = model.norm(hidden)
        best, hidden = _product(model.lm_head, normed).argmax(-1), ttt.handed_on(model, hidden, normed)
        best = best if model.d2t is None else best + model.d2t[best]
        tokens[rows, step] = best
        same = matches(best, batch.ids[rows + step + 1])
        right[rows] += same
        kept = (same & batch.mask[rows + step + 1]).nonzero()[:, 0]
        rows, hidden, drafted = rows[kept], hidden[kept], [(key[kept], value[kept]) for key, value in drafted]
        if not len(rows):
            break
    return tokens, right


def matches(drafted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Say of each draft [N] whether it is the text's token [N]."""
    return drafted == true


@torch.inference_mode()
def teacher_probabilities(head: TeacherHead, batch: Batch, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the verifier's probability [T, depth], float32, of each draft in `tokens` of `draft`; NaN where none is.

    It is what rejection sampling accepts a one-hot draft with: the verifier's distribution under the same sampling.
    """
    found = torch.full(tokens.shape, float("nan"), dtype=torch.float32, device=tokens.device)
    places, steps = batch.mask.nonzero()[:, 0], torch.arange(tokens.shape[1], device=tokens.device)
    size = max(1, _LOGITS[tokens.device.type] // head.vocab_size)
    for chunk, teacher in zip(places.split(size), batch.teacher.split(size), strict=True):
        begun = chunk[:, None] - steps  # [n, depth]: from there this place is reached in step s
        asked = torch.where(begun >= 0, tokens[begun.clamp(min=0), steps], -1)
        drawn = probabilities(head.logits(teacher), sampling).gather(1, asked.clamp(min=0))
        there = asked >= 0
        found[begun[there], steps.expand_as(begun)[there]] = drawn[there]
    return found


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution [n, V] from which a token is drawn, of float32 logits [n, V].

    As vLLM has it (vllm/v1/sample/ops/topk_topp_sampler.py): logits over temperature; those below the k-th largest
    fall out; of the rest the least likely fall out, as long as those fallen out make no more than 1 - p. At temperature
    0 all of it is on the largest logit.
    """
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(-1)
        out = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        out[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), float("-inf"))
    return logits.softmax(-1)


# --- the layer ---------------------------------------------------------------------------------------------


def _product(module: Any, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return module(x) in float32, computed in the precision of its weights."""
    return module(x.to(dtype or module.weight.dtype)).float()  # type: ignore[no-any-return]


def _heads(module: Any, x: torch.Tensor, size: int) -> torch.Tensor:
    return _product(module, x).unflatten(-1, (-1, size))


def _rotary(model: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ttt._rotary(model, positions, torch.empty(0, device=positions.device))


def _keys_and_values(model: Any, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
                     ) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [N, KV heads, d] that positions offer which read `ids` after `hidden`."""
    own = model.layers[0].self_attn
    inputs = ttt._layer_input(model, model.layers[0], ids, hidden)
    keys = ttt._rotate(_heads(own.k_proj, inputs, own.head_dim), *_rotary(model, positions))
    return keys, _heads(own.v_proj, inputs, own.head_dim)


def _starts(batch: Batch) -> list[int]:
    """Return where each document of a batch begins, and the end."""
    starts = [0]
    for length in batch.lengths:
        starts.append(starts[-1] + length)
    return starts


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, drafted: Pairs, rows: torch.Tensor,
            starts: list[int]) -> torch.Tensor:
    """Attention of rows [N] anywhere in a batch, in order: to their documents' tokens up to each, and own drafts."""
    pieces = []
    for first, last, start, stop in _pieces(rows, starts, query.shape[1], _SCORES[query.device.type]):
        own = [(key[first:last], value[first:last]) for key, value in drafted]
        pieces.append(attend_document(query[first:last], keys[start:stop], values[start:stop], own,
                                      rows[first:last] - start + 1))
    return torch.cat(pieces)


def _pieces(rows: torch.Tensor, starts: list[int], heads: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first, last, start, stop): rows first..last - 1 are of one document and see its tokens from start on, the
    last of them up to stop - 1; with about `most` scores a piece."""
    edges = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
    for start, end, first, last in zip(starts, starts[1:], edges, edges[1:], strict=False):
        size = max(1, most // (heads * (end - start)))
        places = rows[first:last][size - 1 :: size].tolist()  # the last row of each piece
        for k, begin in enumerate(range(first, last, size)):
            stop = places[k] + 1 if k < len(places) else int(rows[last - 1]) + 1
            yield begin, min(begin + size, last), start, stop
