"""Training-time test: the drafter drafts several steps ahead over true text, with the least work its loss needs.

speculators' own forward computes every step at every packed position. The loss, though, is taken only where the
verifier generated text, and positions before that (prompts) are needed as keys and values alone. So here
queries, MLP and head run on the rows that carry loss, the teacher's logits are computed once, and attention is
what it is: a triangle over the true tokens and a diagonal for each step drafted since (attention.py). No mask, no
padding, no compiling. This is the plain form; on GPUs in bf16 the same is computed by fused.py, but for drafters with
norms of EAGLE-3.1 (before fc, of what a step hands on), which that does not know. The weights stay
speculators' modules; its forward gives the same loss and gradients.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from eagle3.common.log import logger
from eagle3.drafter.flat_config import NORM_FLAGS
from eagle3.training.attention import attend
from eagle3.training.batches import Batch
from eagle3.training.memory import CHUNK


def hidden_by_step(model: Any, batch: Batch, steps: int, *, recompute: bool = False) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the normed hidden states [R, H] at the batch's R rows.

    Step s continues from its own step s - 1 (its state, not the verifier's) and reads the true token s further
    on: as long as a draft is accepted, that is what the drafter has drafted itself.

    Args:
        recompute: compute the layer again in the backward pass instead of keeping what it needs.
    """
    layer, attention = model.layers[0], model.layers[0].self_attn
    rows, heads = batch.rows, (-1, attention.head_dim)
    residual = model.fc(normed_states(model, batch.aux))
    inputs = _layer_input(model, layer, batch.ids, residual)
    cos, sin = _rotary(model, batch.positions, inputs)
    keys = _rotate(attention.k_proj(inputs).unflatten(-1, heads), cos, sin)
    values = attention.v_proj(inputs).unflatten(-1, heads)
    inputs, residual = inputs[rows], residual[rows]
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(steps):
        given = (model, batch, step, inputs if step == 0 else None, residual, keys, values, drafted)
        residual, normed, *pair = (checkpoint(_step, *given, use_reentrant=False, preserve_rng_state=False)
                                   if recompute else _step(*given))
        drafted = [*drafted, tuple(pair)] if pair else drafted
        yield normed


def _step(model: Any, batch: Batch, step: int, inputs: torch.Tensor | None, residual: torch.Tensor, keys: torch.Tensor,
          values: torch.Tensor, drafted: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Return what leaves a step [R, H] for the next one, the normed states [R, H], and its own key and value (of the
    first step, which has `inputs`, none)."""
    layer, attention = model.layers[0], model.layers[0].self_attn
    heads, rows, pair = (-1, attention.head_dim), batch.rows, list[torch.Tensor]()
    cos, sin = _rotary(model, batch.positions[rows] + step, residual)
    if inputs is None:
        # rows past the end of their text read a wrong token; they carry no loss at this step
        inputs = _layer_input(model, layer, batch.ids[(rows + step).clamp(max=len(batch.ids) - 1)], residual)
        pair = [_rotate(attention.k_proj(inputs).unflatten(-1, heads), cos, sin),
                attention.v_proj(inputs).unflatten(-1, heads)]
        drafted = [*drafted, (pair[0], pair[1])]
    query = _rotate(attention.q_proj(inputs).unflatten(-1, heads), cos, sin, attention.head_dim**-0.5)
    attended = attend(query, keys, values, drafted, batch.spans)
    residual = stream_of(model, residual)
    residual = residual + attention.o_proj(attended.flatten(1))
    residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
    normed = model.norm(residual)
    return handed_on(model, residual, normed), normed, *pair


def logits_by_step(model: Any, batch: Batch, steps: int, fp8: bool = False) -> Iterator[torch.Tensor]:
    """Yield for each TTT step the draft logits [N, D] of the rows that are judged there; `fp8`: in the fused form."""
    if (fused := _fused(batch.aux)) and not has_norms(model):
        yield from fused.logits_by_step(model, batch, steps, fp8)
        return
    for hidden, (judged, _) in zip(hidden_by_step(model, batch, steps), batch.judged, strict=False):
        yield model.lm_head(hidden[judged])


def teacher_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Return the verifier's logits [S, D] over the draft vocabulary at the supervised positions."""
    with torch.no_grad():
        norm = model.verifier_norm  # of RMS, but for verifiers that have another
        fused = _fused(batch.teacher) if hasattr(norm, "variance_epsilon") else None
        normed = fused.norm(batch.teacher, norm) if fused else norm(batch.teacher)
        return model.verifier_lm_head(normed)  # type: ignore[no-any-return]


def loss(model: Any, batch: Batch, steps: int, loss_config: dict[str, Any], decay: float = 1.0,
         counts: torch.Tensor | None = None, recompute: bool = False, fp8: bool = False) -> torch.Tensor:
    """Return the loss [steps], each step's summed over its positions and weighted with decay to the power step.

    Args:
        loss_config: {name: (function of logits and target logits [1, N, D] → [1, N], weight)}, from `losses.of`.
        counts: [steps, 3] int64; what `acceptance.accuracy_counts` counts is added to it.
        recompute: keep little for the backward pass: the layer is computed again there, head and loss too, the latter
            in chunks of rows both times.
        fp8: compute the layer's products in float8 (float8.py), where the fused form is taken.
    """
    targets, losses, correct = teacher_logits(model, batch), [], batch.mask
    each = _in_chunks if recompute else _at_once
    for step, (summed, best) in enumerate(each(model, batch, steps, loss_config, targets, fp8)):
        if counts is not None:
            correct = _count(model, batch, step, best(), correct, counts[step])
        losses.append(summed * decay**step)
    return torch.stack(losses)


Judged = Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]  # a step's loss [], and its draft tokens [N]


def _at_once(model: Any, batch: Batch, steps: int, loss_config: dict[str, Any], targets: torch.Tensor, fp8: bool
             ) -> Judged:
    for step, logits in enumerate(logits_by_step(model, batch, steps, fp8)):
        best = functools.partial(logits.detach().argmax, -1)
        yield _step_loss(logits, targets, batch.judged[step][1], loss_config), best


def _in_chunks(model: Any, batch: Batch, steps: int, loss_config: dict[str, Any], targets: torch.Tensor, fp8: bool
               ) -> Judged:
    """The same with logits of a few thousand rows at a time, in the forward pass and again in the backward one."""
    fused = bool(_fused(batch.aux)) and not has_norms(model)
    if fused:
        from eagle3.training import recompute

        hiddens = recompute.hidden_by_step(model, batch, steps, fp8)
    else:
        hiddens = hidden_by_step(model, batch, steps, recompute=True)

    def part(hidden: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = recompute.head(model, hidden) if fused else model.lm_head(hidden)
        best = logits.detach().argmax(-1)  # before the backward pass, which may put the gradient in their place
        return _step_loss(logits, targets, places, loss_config), best

    for step, hidden in enumerate(hiddens):
        judged, places = batch.judged[step]
        normed = hidden if fused else hidden[judged]
        parts = [checkpoint(part, *pair, use_reentrant=fused, preserve_rng_state=False)
                 for pair in zip(normed.split(CHUNK), places.split(CHUNK), strict=True)]
        sums, bests = zip(*parts, strict=True)
        yield torch.stack(sums).sum(), functools.partial(torch.cat, bests)


def _count(model: Any, batch: Batch, step: int, best: torch.Tensor, correct: torch.Tensor, counts: torch.Tensor
           ) -> torch.Tensor:
    """Count a step's drafted tokens, [N] of the draft vocabulary, into counts [3]; return [T] which positions are
    correct so far."""
    positions = batch.rows[batch.judged[step][0]]
    before = correct[positions]
    right = before & (_as_target_ids(model, best) == batch.ids[positions + step + 1])
    counts += torch.stack([right.sum(), torch.full_like(right.sum(), len(positions)), before.sum()])
    return torch.zeros_like(correct).index_put_((positions,), right)


def draft(
    model: Any, batch: Batch, steps: int, loss_config: dict[str, Any] | None = None, decay: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what is drafted at each step, [T] int64 target ids on the CPU (-1 where no row is judged), and the loss
    [steps] of the same pass as `loss` has it (zeros without loss_config)."""
    targets = teacher_logits(model, batch) if loss_config else None
    drafted, losses = [], torch.zeros(steps)
    for step, logits in enumerate(logits_by_step(model, batch, steps)):
        tokens = torch.full_like(batch.ids, -1)
        tokens[batch.rows[batch.judged[step][0]]] = _as_target_ids(model, logits.argmax(-1))
        drafted.append(tokens.cpu())
        if loss_config and targets is not None:
            losses[step] = _step_loss(logits, targets, batch.judged[step][1], loss_config) * decay**step
    return drafted, losses


def _as_target_ids(model: Any, best: torch.Tensor) -> torch.Tensor:
    """Return tokens [N] of the draft vocabulary as target ids."""
    return best if model.d2t is None else best + model.d2t[best]  # type: ignore[no-any-return]


def _step_loss(logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor, loss_config: dict) -> torch.Tensor:
    """Return the loss [] of draft logits [N, D] against the rows `places` [N] of target logits."""
    if [*loss_config] == ["kl_div"] and (fused := _fused(logits)):
        return loss_config["kl_div"][1] * fused.divergence(logits, targets, places).sum()  # type: ignore[no-any-return]
    wanted = targets[places]
    terms = [weight * function(logits[None], wanted[None]).sum() for function, weight in loss_config.values()]
    return torch.stack(terms).sum()


def has_norms(model: Any) -> bool:
    """Say whether a drafter has norms that the fused form does not know: it is trained in the plain one."""
    return any(getattr(model.config, name) for name in NORM_FLAGS)


def normed_states(model: Any, aux: torch.Tensor) -> torch.Tensor:
    """Return what fc reads of the captured states [T, 3H]: normed together, each by itself, or as they are."""
    if model.input_norm is not None:
        return model.input_norm(aux)  # type: ignore[no-any-return]
    if model.fc_norm is not None:
        parts = aux.chunk(len(model.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], dim=-1)
    return aux


def stream_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return what attention and MLP are added to: what a step reads [N, H], or its norm (`norm_before_residual`)."""
    return model.layers[0].hidden_norm(hidden) if model.config.norm_before_residual else hidden


def handed_on(model: Any, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Return what the next step reads of this one's output [N, H] and its norm."""
    return normed if model.config.norm_output else hidden


def _layer_input(model: Any, layer: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return what q, k and v read: [N, 2H], normed embedding and normed hidden state side by side."""
    with torch.no_grad():
        embedded = model.embed_tokens(ids)
    return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)


@functools.cache
def _kernels() -> ModuleType | None:
    """Return eagle3.training.fused if Triton works here: it compiles at the first use, which needs a C compiler."""
    try:
        from eagle3.training import fused, kernels

        x = torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)
        kernels.norm(x, torch.ones(8, device="cuda"), 1e-6, torch.empty_like(x))
        return fused
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, training can do without
        logger.warning("the fused GPU kernels do not run here, training takes longer and more memory: %s: %s",
                       type(error).__name__, error)
        return None


def _fused(like: torch.Tensor) -> ModuleType | None:
    """Return the fused forms for a tensor of a GPU in bf16; None where the plain form is taken."""
    return _kernels() if like.is_cuda and like.dtype == torch.bfloat16 else None


def fused_on(device: torch.device) -> bool:
    """Say whether training in bf16 takes the fused forms on a device."""
    return device.type == "cuda" and _kernels() is not None


def _rotary(model: Any, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = model.rotary_emb(like[None], positions[None])
    return cos[0, :, None], sin[0, :, None]  # [N, 1, d]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Apply RoPE to [N, heads, d] in its own dtype (halves rotated, as Llama has them), and scale."""
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
    return rotated if scale == 1.0 else rotated * scale

