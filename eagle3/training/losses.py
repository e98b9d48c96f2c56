"""What a drafter is trained to make small, position by position: how far its next token is from the verifier's.

p is the verifier's distribution, q the drafter's, both over the draft vocabulary; α = Σ min(p, q) is the share of
drafts that rejection sampling accepts (Y. Leviathan et al., arXiv 2211.17192). Names and definitions are those of
speculators 0.9, which the tests compare.

  kl_div     Σ p log(p/q)
  ce         -log q at the most likely token of p
  rkl        Σ q log(q/p)
  jsd        (Σ p log(p/m) + Σ q log(q/m)) / 2 with m = (p + q) / 2 (J. Lin, 1991)
  tv         1 - α, the total variation distance
  nla        -log α, α at least 1e-5
  lk_hybrid  λ kl_div + (1 - λ) tv with λ = exp(-3 α), no gradient through λ (A. Samarin et al., arXiv 2602.23881)
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # draft and target logits [..., D] → [...], float32

_SMALLEST_OVERLAP = 1e-5
_HYBRID_ETA = 3.0  # the best in the paper


def of(name: str) -> dict[str, tuple[Loss, float]]:
    """Return a loss by name in the form that a training step takes: {name: (function, weight)}."""
    return {name: (LOSSES[name], 1.0)}


def kl_div(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) [...] of draft and target logits [..., D]."""
    return functional.kl_div(_log(logits), _log(targets).exp(), reduction="none").sum(-1)


def ce(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy [...] with the target's most likely token."""
    return -_log(logits).gather(-1, targets.argmax(-1, keepdim=True)).squeeze(-1)


def rkl(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return KL(q || p) [...]: it keeps to what the target finds likely."""
    return _divergence(_log(logits), _log(targets))


def jsd(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence [...], at most log 2."""
    log_q, log_p = _log(logits), _log(targets)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2.0)
    return (_divergence(log_p, log_m) + _divergence(log_q, log_m)) / 2


def tv(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the total variation distance [...]: the share of drafts that is rejected."""
    return 1.0 - _overlap(logits, targets)


def nla(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return minus the log of the share of accepted drafts [...]."""
    return -_overlap(logits, targets).clamp_min(_SMALLEST_OVERLAP).log()


def lk_hybrid(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a blend of KL and total variation [...], the more of the latter the more is accepted already."""
    overlap = _overlap(logits, targets)
    share = torch.exp(-_HYBRID_ETA * overlap.detach())
    return share * kl_div(logits, targets) + (1.0 - share) * (1.0 - overlap)


def _log(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1, dtype=torch.float32)


def _divergence(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _overlap(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.minimum(_log(logits).exp(), _log(targets).exp()).sum(-1)


LOSSES: dict[str, Loss] = {function.__name__: function for function in (kl_div, ce, rkl, jsd, tv, nla, lk_hybrid)}
