"""What becomes of a forward pass in the engine's process: packed on its device, checked against the engine, sent."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eagle3.states import self_check, slabs
from eagle3.states.encoding import FP8, bytes_per_token, encode_fp8
from eagle3.states.recorder import Pass
from eagle3.states.settings import CaptureSettings

if TYPE_CHECKING:
    import torch


class PassSender:
    """Packs, checks and sends the passes of one process; ranks but the first only lend their part of the head."""

    def __init__(self, settings: CaptureSettings, device: "torch.device", *, first_rank: bool) -> None:
        """Load what the check needs and connect to the stage."""
        self._fp8 = settings.states_dtype == FP8
        self._sender = self._check = None
        if first_rank:
            form = FP8 if self._fp8 else settings.dtype
            size = slabs.slab_bytes(settings.batch_tokens,
                                    bytes_per_token(settings.hidden_size, form, len(settings.layers)))
            self._check = self_check.SelfCheck(settings.model, settings.dtype, device)
            self._sender = slabs.Sender(settings.address, size, device)

    def send(self, passed: Pass, count: int, sequences: int,
             engine_logits: "Callable[[torch.Tensor], torch.Tensor]") -> None:
        """Send the first `count` tokens of a pass, of so many sequences.

        `engine_logits` gives the engine's logits [k, V] of rows [k]; every rank has to ask for them.
        """
        tokens, positions = passed.tokens[:count], passed.positions[:count]
        rows = self_check.rows_to_check(positions, sequences)
        if self._sender is None or self._check is None:
            for some in rows.split(self_check.ROWS):
                engine_logits(some)
            return
        tensors = pass_tensors(tokens, positions, [each[:count] for each in passed.streams], fp8=self._fp8)
        tensors |= self._check.compare(rows, engine_logits, stored_teacher(tensors))
        self._sender.send(tensors)

    def mark(self, batch: int) -> None:
        """Tell the stage that all passes of a batch are through."""
        if self._sender is not None:
            self._sender.tell(batch=batch)


def rehearse(passed: Pass, *, fp8: bool) -> None:
    """Take the memory that packing a pass takes, and forget it."""
    pass_tensors(passed.positions, passed.positions, passed.streams, fp8=fp8)


def pass_tensors(tokens: "torch.Tensor", positions: "torch.Tensor", streams: "list[torch.Tensor]", *, fp8: bool,
                 ) -> "dict[str, Any]":
    """Return what is stored of a pass: {tokens [n], positions [n], finite [n, slots], states [n, slots, H], scales}."""
    import torch

    states = torch.stack(streams, dim=1)
    finite = torch.stack([torch.isfinite(each).all(-1) for each in streams], dim=1)
    # Copies: engines keep ids and positions in buffers that the next pass overwrites.
    result = {"tokens": tokens.to(torch.int64, copy=True), "positions": positions.to(torch.int64, copy=True),
              "finite": finite}
    if fp8:
        result["states"], result["scales"] = encode_fp8(states)
        return result
    return result | {"states": states}


def stored_teacher(tensors: "dict[str, torch.Tensor]") -> "torch.Tensor":
    """Return the teacher states [n, H] that a reader of the file would get, in bfloat16 where they are fp8."""
    import torch

    teacher = tensors["states"][:, -1]
    return teacher if "scales" not in tensors else teacher.to(torch.bfloat16) * tensors["scales"][:, -1].bfloat16()
