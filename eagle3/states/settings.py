"""What a capture is told: built by the stage, read in the engine's interpreter. Standard library only."""

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class CaptureSettings:
    """One capture of one verifier.

    Attributes:
        backend: vllm, sglang, or hf for transformers. model: folder of the verifier.
        layers: three auxiliary ids and the last decoder layer's index, of num_layers. hidden_size: of a stream.
        dtype: precision of the verifier, by its name in torch. states_dtype: auto (the same) or fp8.
        capture: outputs, hooks, or auto: outputs where the model has them (`eagle3.states.recorder`).
        compiled: let vLLM compile the model, which takes it up to a minute and pays for many tokens only.
        max_length: longest sequence, batch_tokens: of one prefill pass, in tokens.
        engine_args: words for the engine's own parser. address: the socket at which the stage takes the states.
    """

    backend: str
    model: str
    trust_remote_code: bool
    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    states_dtype: str
    capture: str
    compiled: bool
    max_length: int
    batch_tokens: int
    tensor_parallel_size: int
    engine_args: tuple[str, ...]
    address: str = ""

    def to_json(self) -> str:
        """Return the settings as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CaptureSettings":
        """Return the settings of a line; TypeError when a name is missing or unknown."""
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("layers", "engine_args")})
