"""What a capture is told: built by the stage, read in the engine's interpreter. Standard library only."""

import dataclasses
import json
from dataclasses import dataclass

CONVENTION = "aux: residual stream entering the layer; last: output of the last decoder layer before the final norm"


@dataclass(frozen=True)
class CaptureSettings:
    """One capture of one verifier.

    Attributes:
        backend: vllm, or hf for transformers. model: folder of the verifier.
        layers: three auxiliary ids and the last decoder layer's index, of num_layers.
        dtype: precision of the verifier, by its name in torch. states_dtype: auto (the same) or fp8.
        max_length: longest sequence, batch_tokens: of one prefill pass, in tokens.
        engine_args: words for vLLM's own parser. directory: where hs_{i}.safetensors go.
        metadata: of each file. One entry: safetensors writes several in random order, and the same states would
            differ in bytes.
    """

    backend: str
    model: str
    trust_remote_code: bool
    layers: tuple[int, ...]
    num_layers: int
    dtype: str
    states_dtype: str
    max_length: int
    batch_tokens: int
    tensor_parallel_size: int
    engine_args: tuple[str, ...]
    directory: str
    metadata: dict[str, str]

    def to_json(self) -> str:
        """Return the settings as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CaptureSettings":
        """Return the settings of a line; TypeError when a name is missing or unknown."""
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("layers", "engine_args")})
