"""SGLang's forward hooks that read the residual stream: imported by SGLang (`forward_hooks`), in each scheduler.

SGLang's decoder layers return the stream in two parts, (hidden, residual), with more behind them in some families; the
next layer's fused norm writes into them, so they are added at once. The pass ends at the logits processor, which is
given the normed output, the head and the batch; there the ids and positions of all tokens are at hand. SGLang calls the
whole model by its `forward`, so a hook on that would never run.
"""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from eagle3.states import self_check
from eagle3.states.pass_sender import PassSender, pass_tensors
from eagle3.states.recorder import Pass, stream
from eagle3.states.settings import CaptureSettings

_MODULE = "eagle3.states.sglang_hooks"
_UNREDUCED = "_sglang_needs_allreduce_fusion"  # an attribute of outputs that the next layer is to sum over the ranks


def specifications(settings: CaptureSettings, control: str) -> list[dict[str, Any]]:
    """Return what SGLang's `forward_hooks` takes; `control` is the socket at which the engine's own process waits.

    The streams entering layers a, b, c are the outputs of the layers before them, the teacher state that of the last.
    """
    common = {"capture": settings.to_json(), "control": control}
    outputs: dict[int, list[int]] = {}
    for slot, layer in enumerate(settings.layers):
        outputs.setdefault(layer if slot == len(settings.layers) - 1 else layer - 1, []).append(slot)
    hooks = [{"name": f"eagle3-layer-{layer}", "target_modules": [f"*layers.{layer}"],
              "hook_factory": f"{_MODULE}:layer_hook", "config": common | {"slots": slots}}
             for layer, slots in sorted(outputs.items())]
    return [*hooks, {"name": "eagle3-end", "target_modules": ["*logits_processor"],
                     "hook_factory": f"{_MODULE}:end_hook", "config": common}]


def layer_hook(config: dict[str, Any]) -> Callable[[Any, Any, Any], None]:
    """Return the hook of a decoder layer, as SGLang's `hook_factory` is called."""
    tap, slots = _tap(config), config["slots"]

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        tap.note(slots, output)

    return hook


def end_hook(config: dict[str, Any]) -> Callable[[Any, Any, Any], None]:
    """Return the hook of the logits processor, as SGLang's `hook_factory` is called."""
    tap = _tap(config)

    def hook(module: Any, inputs: Any, _output: Any) -> None:
        tap.end(module, inputs)

    return hook


class Tap:
    """Puts together what the hooks of one scheduler process see of a pass, and sends it once that was asked for.

    Passes before `start` show that all hooks are in place, and take the memory that a pass needs here.
    """

    def __init__(self, settings: CaptureSettings, rank: int, device: Any) -> None:
        """Load what the check needs and connect to the stage, on the first rank."""
        self._settings, self._fp8 = settings, settings.states_dtype == "fp8"
        self._sender = PassSender(settings, device, first_rank=rank == 0)
        self._streams: dict[int, Any] = {}
        self._sums: list[list[float]] | None = None
        self._started, self._passes, self._moved = False, 0, threading.Condition()

    def note(self, slots: Sequence[int], output: Any) -> None:
        """Keep the stream [tokens, H] that a layer's output stands for.

        Raises ValueError for an output that is not summed over the ranks of tensor parallelism yet, or has no residual
        where one is known to be.
        """
        hidden, residual = output[:2] if isinstance(output, tuple) and len(output) > 1 else (output, None)
        if getattr(hidden, _UNREDUCED, False):
            raise ValueError("SGLang delays the all-reduce behind a layer: its all-reduce fusion has to be off")
        if residual is not None and residual.shape != hidden.shape:
            raise ValueError(f"a layer gives {tuple(hidden.shape)} and {tuple(residual.shape)}: no residual stream")
        value = stream(output)
        self._streams |= dict.fromkeys(slots, value)

    def end(self, module: Any, inputs: Sequence[Any]) -> None:
        """Take a prefill pass at the logits processor, whose inputs are (ids, normed output, head, batch, …).

        Raises LookupError when a stream is missing or has not one row a token, or its residual is elsewhere.
        """
        taken, self._streams = self._streams, {}
        hidden, head, batch = inputs[1:4]
        if hasattr(batch, "residual_stream"):
            raise LookupError("this SGLang keeps the residual stream out of its layers' outputs")
        mode = batch.forward_mode
        if mode.is_idle() or mode.is_decode():
            return
        lengths = batch.extend_seq_lens_cpu
        count = sum(int(length) for length in lengths)
        wanted = len(self._settings.layers)
        shape = (len(hidden), self._settings.hidden_size)
        found = {slot: tuple(value.shape) for slot, value in taken.items()}
        if found != dict.fromkeys(range(wanted), shape) or count > len(hidden):
            raise LookupError(f"{wanted} streams of shape {shape} expected for {count} tokens; hooks on the layers saw "
                              f"{found or 'none'}: SGLang runs this model's layers in a way that hooks do not see "
                              "whole (scattered inputs, overlapping batches, graphs)")
        passed = Pass(batch.input_ids, batch.positions, [taken[slot] for slot in range(wanted)], hidden)
        if self._started:
            self._send(passed, count, len(lengths), module, head, batch)
        else:
            pass_tensors(passed.tokens[:count], passed.positions[:count], passed.streams, fp8=self._fp8)
        with self._moved:
            self._passes += 1
            self._moved.notify_all()

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the engine's own process asks between batches; return the answer.

        {"start": true}: send passes from now on. {"mark": k}: batch k is through. {"wait": n}: until n passes are, for
        the ranks that nobody waits for. The answer has passes, and the checksums of the first pass that was sent.
        """
        if message.get("start"):
            self._started = True
        with self._moved:
            if not self._moved.wait_for(lambda: self._passes >= message.get("wait", 0), timeout=60):
                raise TimeoutError(f"{self._passes} passes here, {message['wait']} on the first rank")
        if "mark" in message:
            self._sender.mark(message["mark"])
        return {"passes": self._passes, "checksums": self._sums}

    def _send(self, passed: Pass, count: int, sequences: int, module: Any, head: Any, batch: Any) -> None:
        if self._sums is None:
            self._sums = self_check.checksums([each[:count] for each in passed.streams])
        metadata = _metadata(batch)

        def engine_logits(rows: Any) -> Any:
            _meet(rows.device)
            return module._get_logits(passed.hidden[rows], head, metadata)

        self._sender.send(passed, count, sequences, engine_logits)


def _metadata(batch: Any) -> Any:
    """Return what SGLang's logits processor makes of a batch, without the buffer in which its own logits lie."""
    from sglang.srt.layers.logits_processor import LogitsMetadata

    metadata = LogitsMetadata.from_forward_batch(batch)
    metadata.next_token_logits_buffer = None
    return metadata


def _meet(device: Any) -> None:
    """Let the ranks of tensor parallelism meet on their devices before they gather logits once more.

    SGLang's own gathering over symmetric memory leaves that out (`skip_entry_sync` in layers/logits_processor.py),
    since a pass gathers once and its layers' all-reduces stand between two passes.
    """
    import torch

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(torch.zeros(1, device=device))


def serve(tap: Tap, connection: socket.socket, rank: int) -> None:
    """Say which rank this is, then answer each line of the engine's own process until it goes."""
    with connection, connection.makefile("r") as lines:
        connection.sendall(json.dumps({"rank": rank}).encode() + b"\n")
        for line in lines:
            try:
                answer = tap.obey(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")


_taps: dict[str, Tap] = {}  # one a process: SGLang calls a factory for each specification


def _tap(config: dict[str, Any]) -> Tap:
    """Return the tap of this process, made and connected when it is first asked for."""
    import torch

    address = config["control"]
    if address not in _taps:
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if spread else 0
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        _taps[address] = Tap(CaptureSettings.from_json(config["capture"]), rank, device)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        threading.Thread(target=serve, args=(_taps[address], connection, rank), daemon=True).start()
    return _taps[address]
