"""How fast training runs: tokens a second, the share of the card's peak, memory, waiting for data, time left."""

import resource
import sys
import time
from collections import deque
from typing import Any

import torch

from eagle3.common.log import duration, size
from eagle3.training.batches import Batch

_WINDOW = 50  # steps over which rates are taken
# Dense bfloat16 products in FLOP/s by a part of the card's name, from NVIDIA's data sheets; the first that fits counts.
_PEAKS = {"GB200": 2.5e15, "B200": 2.25e15, "H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12, "H100 PCIe": 756e12,
          "H100 NVL": 835e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12,
          "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12, "A10": 125e12}


def peak(name: str) -> float | None:
    """Return the dense bfloat16 peak [FLOP/s] of a card by its name, None where it is not known."""
    words = name.replace("-", " ").split()
    return next((flops for part, flops in _PEAKS.items() if set(part.split()) <= {*words}), None)


def operations(model: Any, batch: Batch | None, steps: int) -> int:
    """Return the floating-point operations of a batch's matrix products and attention, forward and backward:
    prompts as keys and values alone, the head where loss is; fc needs no gradient of what it reads."""
    if batch is None or not batch.supervised:
        return 0
    layer, own = model.layers[0], model.layers[0].self_attn
    tokens, rows = len(batch.ids), len(batch.rows)
    kv = own.k_proj.weight.numel() + own.v_proj.weight.numel()
    rest = sum(module.weight.numel() for module in (own.q_proj, own.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj,
                                                    layer.mlp.down_proj))
    judged = sum(len(index) for index, _ in batch.judged[:steps])
    head = model.lm_head.weight.numel()
    pairs = sum((stop - first) * (stop - start + first - start + 1) // 2 for start, first, stop in batch.spans)
    return (4 * model.fc.weight.numel() * tokens + 6 * kv * (tokens + (steps - 1) * rows) + 6 * rest * rows * steps
            + (6 * judged + 2 * len(batch.teacher)) * head + 12 * own.q_proj.weight.shape[0] * pairs * steps)


class Speed:
    """Rates over the last steps of this process; `world` processes do as much each."""

    def __init__(self, device: torch.device, world: int, bf16: bool) -> None:
        self._device, self._world = device, world
        self.peak = peak(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None
        self._steps: deque[tuple[float, float, int, int]] = deque(maxlen=_WINDOW)
        self._since, self._waited = time.monotonic(), 0.0

    def next_of(self, stream: Any, count: int) -> list[Any]:
        """Return the next `count` loaded batches; the time is waiting for data."""
        started = time.monotonic()
        batches = [next(stream) for _ in range(count)]
        self._waited += time.monotonic() - started
        return batches

    def pause(self) -> None:
        """Leave out what happened since the last step: validation, checkpoints."""
        self._since, self._waited = time.monotonic(), 0.0

    def add(self, tokens: int, flops: int) -> None:
        """Count a step that has ended: tokens of all processes, operations of this one."""
        now = time.monotonic()
        self._steps.append((now - self._since, self._waited, tokens, flops))
        self._since, self._waited = now, 0.0

    def figures(self, steps_left: int) -> dict[str, Any]:
        """Return tokens_per_s of all processes, and of this one peak_share (None: not known), memory_bytes (the most so
        far), waiting (share of the time), and left_s."""
        seconds, waited, tokens, flops = (sum(column) for column in zip(*self._steps, strict=True))
        seconds = max(seconds, 1e-9)
        return {"tokens_per_s": round(tokens / seconds, 1),
                "peak_share": round(flops / seconds / self.peak, 4) if self.peak else None,
                "memory_bytes": self._memory(), "waiting": round(waited / seconds, 4),
                "left_s": round(steps_left * seconds / len(self._steps), 1)}

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def say(figures: dict[str, Any]) -> str:
    """Return the figures as a part of a log line."""
    share = "" if figures["peak_share"] is None else f", {100 * figures['peak_share']:.0f}% of the card's peak"
    return (f"{figures['tokens_per_s']:,.0f} tok/s{share}, {size(figures['memory_bytes'])}, "
            f"{100 * figures['waiting']:.1f}% waiting for data, {duration(figures['left_s'])} left")
