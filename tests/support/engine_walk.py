"""A drafter in plain torch, and draft rounds as an engine does them: what predictions are compared with."""

import torch


def rounds(ids: list[int], first: int, depth: int, propose) -> tuple[int, list[int]]:
    """Accept drafts as an engine does, from the first generated token `ids[first]` to the end.

    Args:
        propose: function of the index of the last known token; returns at least `depth` tokens for what follows.
    Returns (rounds, accepted): accepted[k] is how many rounds accepted at least k + 1 tokens.
    """
    count, accepted, known = 0, [0] * depth, first
    while known + 1 < len(ids):
        count += 1
        matched = 0
        for token, true in zip(propose(known)[:depth], ids[known + 1 :], strict=False):
            if token != true:
                break
            accepted[matched] += 1
            matched += 1
        known += matched + 1
    return count, accepted


def drafts(model, ids: list[int], states: torch.Tensor, known: int, depth: int) -> list[int]:
    """Return what a drafter proposes after `ids[known]`: one token at a time, everything computed anew.

    Args:
        states: [T, A x H] float32, the verifier's auxiliary states.
    """
    layer, tokens, drafted, has = model.layers[0], list(ids[1 : known + 1]), [], model.config
    states = states[:known]
    if has.norm_before_fc:
        states = model.input_norm(states)
    if has.fc_norm:
        states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, states.chunk(3, -1), strict=True)], -1)
    hidden = model.fc(states)
    for _ in range(depth):
        read = torch.cat([layer.input_layernorm(model.embed_tokens(torch.tensor(tokens))), layer.hidden_norm(hidden)],
                         -1)
        out = (layer.hidden_norm(hidden) if has.norm_before_residual else hidden) + attention(layer.self_attn, read)
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        normed = model.norm(out[-1:])
        best = int(model.lm_head(normed).argmax())
        drafted.append(best + int(model.d2t[best]))
        tokens.append(drafted[-1])
        hidden = torch.cat([hidden, normed if has.norm_output else out[-1:]])
    return drafted


def attention(module, read: torch.Tensor) -> torch.Tensor:
    """Return causal attention [T, H] over [T, 2H]; a key stands one position after the token of its states."""
    size, theta = module.head_dim, module.config.rope_parameters["rope_theta"]
    query, key, value = (projection(read).unflatten(-1, (-1, size)).transpose(0, 1)
                         for projection in (module.q_proj, module.k_proj, module.v_proj))
    angles = torch.arange(1, len(read) + 1)[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    groups = len(query) // len(key)
    key, value = (x.repeat_interleave(groups, 0) for x in (rotated(key), value))
    out = torch.nn.functional.scaled_dot_product_attention(rotated(query), key, value, is_causal=True)
    return module.o_proj(out.transpose(0, 1).flatten(1))
