"""Proof that what was captured is the verifier's own distribution."""

from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.common.errors import PreconditionError
from eagle3.drafter.verifier import Verifier
from eagle3.states.collecting import Rows
from eagle3.states.encoding import FP8
from eagle3.states.store import Sample, StateStore

if TYPE_CHECKING:
    import torch

# Agreement is judged once this many positions (or log-probabilities) are in; a few rounding ties must not decide.
_ENOUGH = 20
# Mean absolute difference of log-probabilities (nats) that is noise, by what the files hold. On SmolLM2-135M it is
# 0.000 in float32, 0.029 in bfloat16 (vLLM on a CPU) and 0.09 in fp8.
_LARGEST_DIFFERENCE = {"float32": 0.01, "bfloat16": 0.15, "float16": 0.15, FP8: 0.3}


class AgreementCheck:
    """Proof that the stored teacher states, with the verifier's norm and head, are its distribution.

    lm_head(final_norm(stored state of the last token)) must give the token that the engine itself produced next: a
    wrong layer, a state stored after the norm, or a shifted capture fails on most samples; rounding ties fail on a few.
    And the log-probabilities of that token, and once of all tokens of a few beginnings, must be the engine's within
    the noise of its precision: a scale or a cap of the logits leaves every most likely token what it is.
    """

    def __init__(self, verifier: Verifier, store: StateStore, minimum: float, dtype: str, form: str) -> None:
        """Load norm and head.

        Args:
            minimum: share of samples that has to agree. dtype: of the engine. form: what the files hold, dtype or fp8.
        """
        import torch

        from eagle3.drafter.teacher import TeacherHead

        self._head = TeacherHead(verifier, getattr(torch, dtype))
        self._store, self._minimum, self._largest = store, minimum, _LARGEST_DIFFERENCE[form]
        self.agreed = self.checked = self.compared = 0
        self._difference = 0.0

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Check finished samples by reading their last row back from disk; raise when too many disagree."""
        import torch

        if not entries:
            return
        rows = torch.stack([self._store.last_teacher(entry["i"]) for entry in entries])
        expected = torch.tensor([entry["next_token"] for entry in entries])
        self.agreed += int((self._head.logits(rows).argmax(-1) == expected).sum())
        self.checked += len(entries)
        self._compare(rows, expected, [entry["next_logprob"] for entry in entries])
        self.judge(_ENOUGH)

    def add_rows(self, entries: list[dict[str, Any]], rows: dict[int, Rows], samples: dict[int, Sample]) -> None:
        """Count what the engine's side compared of finished samples, in their generated part; raise as `add` does.

        At the last token the engine's logits have to give the token that it really produced next, or they are of
        another sample.
        """
        for entry in entries:
            found, mask = rows.get(entry["i"]), np.asarray(samples[entry["i"]].loss_mask)
            if found is None:
                continue
            found = found.of(found.places >= np.flatnonzero(mask)[0] - 1)
            last = found.places == entry["tokens"] - 1
            agrees = found.agrees & (~last | (found.tokens == entry["next_token"]))
            self.agreed += int(agrees.sum())
            self.checked += len(agrees)
            self.compared += len(agrees)
            self._difference += float(found.differences.sum())
        self.judge(_ENOUGH)

    def add_prompts(self, said: dict[int, list[float]]) -> None:
        """Check the beginnings of finished samples: `said` has the engine's log-probability of tokens 1, 2, …"""
        for number, logprobs in said.items():
            states, ids = self._store.load(number)
            self._compare(states[: len(logprobs), -1], ids[1 : 1 + len(logprobs)], logprobs)
        self.judge(_ENOUGH)

    def _compare(self, states: "torch.Tensor", tokens: "torch.Tensor", logprobs: list[float]) -> None:
        import torch

        ours = self._head.log_probabilities(states, tokens)
        self._difference += float((ours - torch.tensor(logprobs)).abs().sum())
        self.compared += len(logprobs)

    @property
    def ratio(self) -> float:
        """Share of checked samples that agree (1.0 before the first)."""
        return self.agreed / self.checked if self.checked else 1.0

    @property
    def difference(self) -> float:
        """Mean absolute difference of log-probabilities, in nats."""
        return self._difference / self.compared if self.compared else 0.0

    def figures(self) -> dict[str, Any]:
        """Return what the manifest says of it."""
        return {"agreement": self.ratio, "positions_checked": self.checked,
                "logprob_difference": round(self.difference, 6), "logprobs_compared": self.compared}

    def judge(self, enough: int = 1) -> None:
        """Raise PreconditionError when `enough` is known and it is not the engine's distribution."""
        if self.checked >= enough and self.ratio < self._minimum:
            raise PreconditionError(
                "the captured teacher states do not give the engine's own next tokens",
                where=self._store.files,
                expected=f"agreement on at least {self._minimum:.0%} of the positions",
                found=f"{self.agreed} of {self.checked} positions ({self.ratio:.0%})",
                fix="check model.layers and the model folder (weights of another model?); --min-agreement lowers the "
                "bar",
            )
        if self.compared >= enough and not self.difference <= self._largest:
            raise PreconditionError(
                "the captured teacher states do not give the engine's own probabilities",
                where=self._store.files,
                expected=f"log-probabilities that differ by at most {self._largest} in the mean",
                found=f"{self.difference:.3f} over {self.compared} tokens; the most likely token agrees on "
                f"{self.agreed} of {self.checked} positions",
                fix="check the model folder (weights of another model?); a family that scales or caps its logits, or "
                "has another norm, has to be in eagle3/drafter/output.py: its drafter would learn wrong probabilities",
            )
