"""The verifier's own distribution out of its last residual stream: what drafters learn and states are checked by."""

from typing import Any

import torch

from eagle3.drafter.verifier import NORM_BIAS, Verifier, load_shared_weights


class CappedHead(torch.nn.Linear):
    """An output head with a soft cap: cap · tanh(x Wᵀ / cap)."""

    def __init__(self, hidden_size: int, rows: int, cap: float) -> None:
        super().__init__(hidden_size, rows, bias=False)
        self.cap = cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., rows] of normed states [..., H]."""
        return self.cap * torch.tanh(super().forward(x) / self.cap)


def fit_modules(model: Any, verifier: Verifier) -> None:
    """Give a drafter the frozen norm and head that this verifier needs, without their weights.

    A norm that subtracts the mean and a soft cap are no RMS norm and no matrix; all else is in the weights.
    """
    how, size = verifier.output, verifier.hidden_size
    if how.layer_norm:
        model.verifier_norm = torch.nn.LayerNorm(size, eps=verifier.rms_norm_eps)
    else:
        model.verifier_norm.variance_epsilon = verifier.rms_norm_eps  # speculators gives it the drafter's
    if how.softcap:
        model.verifier_lm_head = CappedHead(size, model.verifier_lm_head.out_features, how.softcap)


class TeacherHead:
    """The verifier's final norm and output head, for checks on a few rows; the norm in float32."""

    def __init__(
        self, verifier: Verifier, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        """Load both; the head computes in `dtype` (default: that of the file, or float32 where a scale is in it)."""
        weights = {name: weight.to(device) for name, weight in
                   load_shared_weights(verifier, ("norm", "lm_head")).items()}
        self._norm, self._bias = weights["norm"].float(), weights.get(NORM_BIAS)
        self._head, self._eps, self._how = weights["lm_head"].to(dtype), verifier.rms_norm_eps, verifier.output

    def to(self, device: torch.device) -> "TeacherHead":
        """Move norm and head to a device; return this."""
        self._norm, self._head = self._norm.to(device), self._head.to(device)
        self._bias = None if self._bias is None else self._bias.to(device)
        return self

    @property
    def vocab_size(self) -> int:
        """How many logits there are."""
        return len(self._head)

    def logits(self, teacher_states: torch.Tensor) -> torch.Tensor:
        """Return the verifier's logits [n, V], float32, of teacher states [n, H]."""
        logits = (self.normed(teacher_states).to(self._head.dtype) @ self._head.T).float()
        return self._how.softcap * torch.tanh(logits / self._how.softcap) if self._how.softcap else logits

    def log_probabilities(self, teacher_states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probability [n], float32, of `tokens` [n] after teacher states [n, H]."""
        return self.logits(teacher_states).log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    def normed(self, teacher_states: torch.Tensor) -> torch.Tensor:
        """Return teacher states [n, H] after the final norm, in float32."""
        states = teacher_states.to(self._norm.device, torch.float32)
        if self._how.layer_norm:
            return torch.nn.functional.layer_norm(states, states.shape[-1:], self._norm, self._bias, self._eps)
        return states * (states.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt() * self._norm

    def rows(self, tokens: list[int]) -> torch.Tensor:
        """Return the head's rows [n, H] of tokens, in float32 (before a soft cap, which keeps their order)."""
        return self._head[tokens].float()
