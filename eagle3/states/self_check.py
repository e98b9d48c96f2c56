"""The teacher states of a pass against the engine's own logits, where both are: on its device.

The engine's logits of a row come from its own normed output, through its own head. Ours come from the state that is
stored (fp8: decoded again), through norm and head as the files of the verifier have them, which is what stage 04
learns from. The most likely token has to be the same, and its log-probability within the noise of the precision.

Looked at are one row in `STRIDE` and the last row of every sequence: on SmolLM2-135M, whose head is a fifth of it, all
rows would cost two fifths of the forward pass, these cost less than one in a hundred.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STRIDE = 64
ROWS = 128  # compared at a time: logits of a vocabulary of 163,840 take 84 MB in float32


def rows_to_check(positions: "torch.Tensor", sequences: int) -> "torch.Tensor":
    """Return the rows [n // STRIDE + sequences], int64, to look at, without waiting for the device.

    Args:
        positions: [n] of each token in its sequence, sequences one after the other.
        sequences: how many there are.
    """
    import torch

    count = len(positions)
    every = torch.arange(count % STRIDE, count, STRIDE, device=positions.device)
    place = torch.arange(count, device=positions.device)
    last = torch.ones(count, dtype=torch.bool, device=positions.device)
    last[:-1] = positions[1:] != positions[:-1] + 1
    which = torch.where(last, last.cumsum(0) - 1, sequences).clamp(max=sequences)  # the rest goes into a spare place
    ends = torch.zeros(sequences + 1, dtype=torch.int64, device=positions.device).scatter_(0, which, place)[:-1]
    return torch.cat([every, ends])


class SelfCheck:
    """Norm and head of the verifier on a device."""

    def __init__(self, model: str, dtype: str, device: "torch.device") -> None:
        """Load them from the verifier's folder; the head computes in `dtype`, as the engine does."""
        import torch

        from eagle3.drafter import verifier
        from eagle3.drafter.teacher import TeacherHead

        self._head = TeacherHead(verifier.read(Path(model)), getattr(torch, dtype)).to(device)

    def compare(self, rows: "torch.Tensor", engine_logits: "Callable[[torch.Tensor], torch.Tensor]",
                teacher: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Compare the rows [r] of a pass.

        Args:
            engine_logits: the engine's logits [k, V] of rows [k]. teacher: stored teacher states [n, H] of the pass.
        Returns:
            {rows [r] int64, row_tokens [r] int64: the engine's most likely token, row_agrees [r] bool: ours is the
            same, row_differences [r] float32: of that token's log-probability, in nats}.
        """
        import torch

        tokens, agrees, differences = [], [], []
        for some in rows.split(ROWS):
            theirs = engine_logits(some).float()
            token = theirs.argmax(-1)
            ours = self._head.logits(teacher[some])
            tokens.append(token)
            agrees.append(ours.argmax(-1) == token)
            differences.append(_log_probability(theirs, token) - _log_probability(ours, token))
        return {"rows": rows, "row_tokens": torch.cat(tokens), "row_agrees": torch.cat(agrees),
                "row_differences": torch.cat(differences).abs()}


def _log_probability(logits: "torch.Tensor", tokens: "torch.Tensor") -> "torch.Tensor":
    """Return the log-probability [r] of tokens [r] under logits [r, V]."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def checksums(streams: "list[torch.Tensor]") -> list[list[float]]:
    """Return two sums for each stream [n, H]: of its values, and of their sizes weighted by their row.

    Ranks of tensor parallelism all hold the whole stream; one that has not been summed over the ranks differs.
    """
    import torch

    found = []
    for each in streams:
        weights = torch.linspace(1, 2, len(each), dtype=torch.float64, device=each.device)
        sums = torch.zeros(2, dtype=torch.float64, device=each.device)
        for some, weight in zip(each.split(1024), weights.split(1024), strict=True):
            wide = some.double()
            sums += torch.stack([wide.sum(), wide.abs().sum(-1) @ weight])
        found.append(sums.tolist())
    return found


def ranks_agree(found: list[Any]) -> str:
    """Return what differs between the checksums of the ranks, empty if nothing does; see `checksums`."""
    first = found[0]
    for rank, other in enumerate(found[1:], 1):
        for slot, (ours, theirs) in enumerate(zip(first, other, strict=True)):
            if abs(ours[1] - theirs[1]) > 0.01 * abs(ours[1]):
                return f"layer slot {slot}: rank 0 has a sum of {ours[1]:.6g}, rank {rank} {theirs[1]:.6g}"
    return ""
