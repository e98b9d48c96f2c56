"""How states lie in a file, and what they are read into.

States lie there in the verifier's precision, or as fp8: `hidden_states` float8_e4m3fn beside
`hidden_states_scales` float32, read as fp8.to(dtype) * scale.to(dtype). That is what `hs_connectors` calls FP8; its
one scale a token becomes one for each token and slot, so that a layer far smaller than the last is not rounded away.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.common import tensor_files

if TYPE_CHECKING:
    import numpy as np
    import torch

SCALES = "hidden_states_scales"
FP8 = "fp8"
# What an fp8 file says of itself in its metadata.
FP8_FORM = "float8_e4m3fn; hidden_states.to(dtype) * hidden_states_scales.to(dtype), a scale for each token and slot"
_FP8_MAX = 448.0
# Scales keep every product a normal, finite bf16: 2^-9 (the smallest fp8) x 2^-100, and 448 x 145 x 2^112.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-100, 145 * 2.0**112


def bytes_per_token(hidden_size: int, dtype: str = "bfloat16", slots: int = 4) -> int:
    """Return the bytes that one token takes on disk: `slots` vectors in `dtype` (fp8: with a float32 scale each) and
    an int64 id."""
    vector = hidden_size + 4 if dtype == FP8 else hidden_size * (4 if dtype == "float32" else 2)
    return slots * vector + 8


def encode_fp8(states: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return finite states [T, slots, H] as (float8_e4m3fn [T, slots, H], float32 scales [T, slots, 1]).

    A scale is amax / 448, rounded to what bf16 holds: decoding in bf16 uses the very scale that encoding divided by,
    and a value is rounded to fp8 once and its product to bf16 once. Powers of two would make the product exact, but
    put the largest value of a vector anywhere on fp8's coarse grid instead of on 448. Where one value makes most of a
    vector's norm, as in many models, that costs a third: on SmolLM2-135M an error of 3.9% instead of 2.9% of the
    vector for the worst token in a hundred (median 2.5% and 2.2%).
    """
    import torch

    encoded = torch.empty(states.shape, dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty((*states.shape[:-1], 1), dtype=torch.float32, device=states.device)
    for slot in range(states.shape[1]):  # one at a time: float32 quotients take twice the memory of bf16 states
        scale = states[:, slot].abs().amax(-1, keepdim=True).float() / _FP8_MAX
        scales[:, slot] = scale.to(torch.bfloat16).clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
        # A scale rounded down gives quotients up to 452; fp8 rounds all below 464 to 448, and only then overflows.
        encoded[:, slot] = states[:, slot] / scales[:, slot]
    return encoded, scales


def decode_fp8(encoded: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    """Return the bfloat16 states of an fp8 form on the CPU (H even), scales broadcast; NaN stays NaN."""
    import numpy as np
    import torch

    values = _values_of_pairs()[encoded.contiguous().view(torch.int16).numpy().view(np.uint16)]
    return torch.from_numpy(values).view(torch.bfloat16).mul_(scales.to(torch.bfloat16))


@functools.cache
def _values_of_pairs() -> "np.ndarray":
    """Return the two bf16 values, as one int32, of any two fp8 bytes. Looking them up takes a quarter of the time of
    torch's conversion, which on one core took longer than reading the file."""
    import torch

    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float8_e4m3fn)
    return pairs.to(torch.bfloat16).view(torch.int32).numpy()


@dataclass(frozen=True)
class Stored:
    """What a file holds: hidden [T, slots, H] in whatever form, fp8 scales [T, slots, 1] or None, ids [T] int64."""

    hidden: "torch.Tensor"
    scales: "torch.Tensor | None"
    ids: "torch.Tensor"

    @staticmethod
    def within(data: "torch.Tensor") -> "Stored":
        """Return them as views of a safetensors file in memory [bytes] uint8."""
        import torch

        types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
                 "I64": torch.int64}
        header, start = tensor_files.parse_header(data.numpy())

        def view(name: str) -> "torch.Tensor":
            begin, end = header[name]["data_offsets"]
            return data[start + begin : start + end].view(types[header[name]["dtype"]]).view(header[name]["shape"])

        hidden = view("hidden_states")
        return Stored(hidden, view(SCALES) if hidden.dtype == torch.float8_e4m3fn else None, view("token_ids"))

    def tokens(self, first: int, stop: int) -> "Stored":
        """Return views of some tokens of it."""
        scales = None if self.scales is None else self.scales[first:stop]
        return Stored(self.hidden[first:stop], scales, self.ids[first:stop])

    def states(self, device: "torch.device | None" = None) -> "torch.Tensor":
        """Return the states [T, slots, H] on a device (default: the CPU), fp8 decoded to bfloat16 there."""
        import torch

        if self.scales is None:
            return self.hidden if device is None else self.hidden.to(device, non_blocking=True)
        if device is None or device.type == "cpu":
            return decode_fp8(self.hidden, self.scales)
        hidden, scales = (part.to(device, non_blocking=True) for part in (self.hidden, self.scales))
        return hidden.to(torch.bfloat16).mul_(scales.to(torch.bfloat16))
