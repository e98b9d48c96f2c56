"""Training-time test: the drafter drafts several steps ahead over true text, with the least work its loss needs.

speculators' own forward computes every step at every packed position. The loss, though, is taken only where the
verifier generated text, and positions before that (prompts) are needed as keys and values alone. So here
queries, MLP and head run on the rows that carry loss, the teacher's logits are computed once, and attention is
what it is: a triangle over the true tokens and a diagonal for each step drafted since. No mask, no padding, no
compiling: on GPUs flash attention and the fused kernels of kernels.py. The weights stay speculators' modules;
its forward gives the same loss and gradients.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from eagle3.common.log import logger
from eagle3.training.batches import Batch

Spans = list[tuple[int, int, int]]


def hidden_by_step(model: Any, batch: Batch, steps: int) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the normed hidden states [R, H] at the batch's R rows.

    Step s continues from its own step s - 1 (its state, not the verifier's) and reads the true token s further
    on: as long as a draft is accepted, that is what the drafter has drafted itself.
    """
    layer, attention = model.layers[0], model.layers[0].self_attn
    rows, ids = batch.rows, batch.ids
    heads, size = (-1, attention.head_dim), attention.head_dim**-0.5
    residual = model.fc(batch.aux)
    inputs = _layer_input(model, layer, ids, residual)
    cos, sin = _rotary(model, batch.positions, inputs)
    keys = _rotate(attention.k_proj(inputs).unflatten(-1, heads), cos, sin)
    values = attention.v_proj(inputs).unflatten(-1, heads)
    inputs, residual = inputs[rows], residual[rows]
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        cos, sin = _rotary(model, batch.positions[rows] + step, inputs)
        if step:
            # rows past the end of their text read a wrong token; they carry no loss at this step
            inputs = _layer_input(model, layer, ids[(rows + step).clamp(max=len(ids) - 1)], residual)
            own_key = _rotate(attention.k_proj(inputs).unflatten(-1, heads), cos, sin)
            drafted.append((own_key, attention.v_proj(inputs).unflatten(-1, heads)))
        query = _rotate(attention.q_proj(inputs).unflatten(-1, heads), cos, sin, size)
        attended = attend(query, keys, values, drafted, batch.spans)
        residual = residual + attention.o_proj(attended.flatten(1))
        residual = residual + layer.mlp(_norm(layer.post_attention_layernorm, residual))
        yield _norm(model.norm, residual)


def logits_by_step(model: Any, batch: Batch, steps: int) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the draft logits [N, D] of the rows that are judged there."""
    for hidden, (judged, _) in zip(hidden_by_step(model, batch, steps), batch.judged, strict=False):
        yield model.lm_head(hidden[judged])


def teacher_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the verifier's logits [S, D] over the draft vocabulary at the supervised positions."""
    with torch.no_grad():
        return model.verifier_lm_head(_norm(model.verifier_norm, batch.teacher))  # type: ignore[no-any-return]


def loss(model: Any, batch: Batch, steps: int, loss_config: dict[str, Any], decay: float = 1.0) -> torch.Tensor:
    """Return the loss [steps], each step's summed over its positions and weighted with decay to the power step.

    Args:
        loss_config: {name: (function of logits and target logits [1, N, D] → [1, N], weight)}, as speculators has it.
    """
    targets = teacher_logits(model, batch)
    return torch.stack([_step_loss(batch, step, logits, targets, loss_config) * decay**step
                        for step, logits in enumerate(logits_by_step(model, batch, steps))])


def draft(
    model: Any, batch: Batch, steps: int, loss_config: dict[str, Any] | None = None, decay: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what is drafted at each step, [T] int64 target ids on the CPU (-1 where no row is judged), and the loss
    [steps] of the same pass as `loss` has it (zeros without loss_config)."""
    targets = teacher_logits(model, batch) if loss_config else None
    drafted, losses = [], torch.zeros(steps)
    for step, logits in enumerate(logits_by_step(model, batch, steps)):
        best = logits.argmax(-1)
        tokens = torch.full_like(batch.ids, -1)
        tokens[batch.rows[batch.judged[step][0]]] = best if model.d2t is None else best + model.d2t[best]
        drafted.append(tokens.cpu())
        if loss_config and targets is not None:
            losses[step] = _step_loss(batch, step, logits, targets, loss_config) * decay**step
    return drafted, losses


def _step_loss(batch: Batch, step: int, logits: torch.Tensor, targets: torch.Tensor, loss_config: dict) -> torch.Tensor:
    places = batch.judged[step][1]
    if [*loss_config] == ["kl_div"] and (fused := _fused(logits)):
        return loss_config["kl_div"][1] * fused.divergence(logits, targets, places).sum()  # type: ignore[no-any-return]
    wanted = targets[places]
    terms = [weight * function(logits[None], wanted[None]).sum() for function, weight in loss_config.values()]
    return torch.stack(terms).sum()


def _layer_input(model: Any, layer: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return what q, k and v read: [N, 2H], normed embedding and normed hidden state side by side."""
    with torch.no_grad():
        embedded = model.embed_tokens(ids)
    return torch.cat([_norm(layer.input_layernorm, embedded), _norm(layer.hidden_norm, hidden)], dim=-1)


@functools.cache
def _kernels() -> ModuleType | None:
    """Return eagle3.training.kernels if Triton works here: it compiles at the first use, which needs a C compiler."""
    try:
        from eagle3.training import kernels

        kernels.norm(torch.ones(1, 8, device="cuda", dtype=torch.bfloat16), torch.ones(8, device="cuda"), 1e-6)
        return kernels
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, training can do without
        logger.warning("the fused GPU kernels do not run here, training takes longer and more memory: %s: %s",
                       type(error).__name__, error)
        return None


def _fused(like: torch.Tensor) -> ModuleType | None:
    """Return the fused kernels for a tensor of a GPU in half precision; None where the plain form is taken."""
    return _kernels() if like.is_cuda and like.dtype in (torch.bfloat16, torch.float16) else None


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of x [N, H]: of RMS, but for the teacher of a verifier that has another."""
    if hasattr(module, "variance_epsilon") and (fused := _fused(x)):
        return fused.norm(x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]


def _rotary(model: Any, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = model.rotary_emb(like[None], positions[None])
    return cos[0, :, None], sin[0, :, None]  # [N, 1, d]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Apply RoPE to [N, heads, d] in its own dtype (halves rotated, as Llama has them), and scale."""
    if fused := _fused(x):
        return fused.rotate(x, cos[:, 0], sin[:, 0], scale)  # type: ignore[no-any-return]
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
    return rotated if scale == 1.0 else rotated * scale


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
        flat = [tensor for pair in drafted for tensor in pair]
        return _FlashAttend.apply(query, keys, values, spans, *flat)  # type: ignore[no-any-return]
    pieces, row = [], 0
    for start, first, stop in spans:
        count = stop - first
        own = [(key[row : row + count], value[row : row + count]) for key, value in drafted]
        pieces.append(_attend_document(query[row : row + count], keys[start:stop], values[start:stop], own))
        row += count
    return torch.cat(pieces)


def _attend_document(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, drafted: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Attention of a document's last `count` positions, scores in memory: for short documents and CPUs."""
    count, heads, size = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.view(count, kv_heads, heads // kv_heads, size)
    queries = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, size)  # [KV heads, group x count, d]
    scores = (queries @ keys.permute(1, 2, 0)).view(kv_heads, -1, count, length)
    future = torch.ones(count, length, dtype=torch.bool, device=query.device).triu_(length - count + 1)
    scores = scores.masked_fill(future, float("-inf"))
    diagonals = [(grouped * key[:, :, None]).sum(-1).permute(1, 2, 0)[..., None] for key, _ in drafted]
    weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
    out = weights[..., :length].reshape(kv_heads, -1, length) @ values.permute(1, 0, 2)
    out = out.view(kv_heads, -1, count, size)
    for step, (_, value) in enumerate(drafted):
        out = out + weights[..., length + step, None] * value.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(count, heads, size)


def _merge(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The plain form of kernels.merge."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    score = (query.float() * key).sum(-1)
    after = torch.logaddexp(lse, score)
    out.mul_((lse - after).exp()[..., None]).add_((score - after).exp()[..., None] * value)
    lse.copy_(after)


def _merge_gradients(
    gradient: torch.Tensor, query: torch.Tensor, out: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    lse: torch.Tensor, dquery: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain form of kernels.merge_gradients."""
    shape = key.shape[1], query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(shape[1], 1) for tensor in (key, value))
    weight = ((query.float() * keys).sum(-1) - lse).exp()
    dscore = (weight * (gradient.float() * (values.float() - out)).sum(-1))[..., None]
    dquery += dscore * keys
    dkey, dvalue = (share.unflatten(1, shape).sum(2).to(key.dtype)
                    for share in (dscore * query, weight[..., None] * gradient))
    return dkey, dvalue


class _FlashAttend(torch.autograd.Function):
    """The same on a GPU: flash attention over the triangle, the diagonals merged in by log-sum-exp.

    Flash attention's backward recomputes probabilities from the log-sum-exp and takes its row terms from the
    output. Given those of the whole row, diagonals included, it returns the triangle's share of the gradients
    (as ring attention does with its blocks); the diagonals' share is a few products by hand.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans,
                *drafted: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [R, heads, d]."""
        lengths = [(stop - first, stop - start) for start, first, stop in spans]
        taken = torch.cat([torch.arange(start, stop) for start, _, stop in spans]).to(query.device)
        cumulative = torch.tensor([[0, 0], *lengths]).cumsum(0).int().to(query.device)
        limits = (max(rows for rows, _ in lengths), max(tokens for _, tokens in lengths))
        query, used_keys, used_values = query.contiguous(), keys[taken], values[taken]
        triangle, triangle_lse, *random = torch.ops.aten._flash_attention_forward(
            query, used_keys, used_values, cumulative[:, 0].contiguous(), cumulative[:, 1].contiguous(), *limits, 0.0,
            True, False, scale=1.0)[:4]
        fused, lse = _fused(query), triangle_lse.T.contiguous()
        merge = fused.merge if fused else _merge
        out = triangle.float() if drafted else triangle
        for key, value in zip(drafted[::2], drafted[1::2], strict=True):
            merge(query, key, value, out, lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, used_keys, used_values, taken, cumulative, lse, out, *random, *drafted)
        ctx.limits, ctx.tokens = limits, len(keys)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of query, keys, values and the drafted keys and values."""
        query, keys, values, taken, cumulative, lse, out, state, unused, *drafted = ctx.saved_tensors
        gradient = gradient.contiguous()
        dquery, dkeys, dvalues = torch.ops.aten._flash_attention_backward(
            gradient, query, keys, values, out, lse.T.contiguous(), cumulative[:, 0].contiguous(),
            cumulative[:, 1].contiguous(), *ctx.limits, 0.0, True, state, unused, scale=1.0)
        dquery = dquery.float() if drafted else dquery
        own: list[torch.Tensor] = []
        fused = _fused(query)
        merge_gradients = fused.merge_gradients if fused else _merge_gradients
        for key, value in zip(drafted[::2], drafted[1::2], strict=True):
            own += merge_gradients(gradient, query, out, key, value, lse, dquery)
        full = [gradient.new_zeros(ctx.tokens, *part.shape[1:], dtype=part.dtype).index_copy_(0, taken, part)
                for part in (dkeys, dvalues)]
        return (dquery.to(query.dtype), *full, None, *own)
