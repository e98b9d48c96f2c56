"""What the verifier's own files say: sizes, layers, RoPE, and the few weights a drafter shares with it.

The facts come from config.json alone (no transformers, no remote code), so a dry run answers for a model
whose weights are elsewhere. Weights are read by name from the safetensors shards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import files, tensor_files
from eagle3.common.errors import PreconditionError

if TYPE_CHECKING:
    import torch

# Names under which the shared weights are found, the most specific suffix first. Text models inside
# multimodal wrappers carry a prefix such as `language_model.`.
_SUFFIXES = {
    "embed_tokens": ("model.embed_tokens.weight",),
    "lm_head": ("lm_head.weight",),
    "norm": ("model.norm.weight",),
}


@dataclass(frozen=True)
class Verifier:
    """Facts of a verifier; sizes in elements, lengths in tokens.

    Attributes:
        config: the text part of config.json.
        mla: whether attention is multi-head latent (DeepSeek, Kimi), so that heads do not carry over.
    """

    folder: Path
    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tied_embeddings: bool
    mla: bool
    config: dict[str, Any]

    def layers(self, requested: list[int]) -> list[int]:
        """Return the four captured layers: three auxiliary ids and the last decoder layer's index.

        Auxiliary id k is the residual stream entering decoder layer k (the convention of vLLM, speculators
        and SGLang inside); the last entry N-1 is that layer's output before the final norm. N is accepted
        for it, because engines number that same stream so.
        """
        last = self.num_layers - 1
        if not requested:
            return [2, self.num_layers // 2, self.num_layers - 3, last]
        layers = [*requested[:-1], last if requested[-1] == self.num_layers else requested[-1]]
        auxiliary = layers[:-1]
        if layers[-1] != last or not auxiliary:
            raise PreconditionError(
                "the last of --layers must be the last decoder layer (its output is the teacher state)",
                where="model.layers",
                expected=f"…, {last} (or {self.num_layers}, the same stream)",
                found=requested,
            )
        if auxiliary != sorted(set(auxiliary)) or auxiliary[0] < 1 or auxiliary[-1] > last:
            raise PreconditionError(
                "auxiliary layers must ascend and lie inside the model (engines emit them in ascending order)",
                where="model.layers",
                expected=f"ids from 1 to {last}, ascending",
                found=auxiliary,
            )
        return layers


def read(folder: Path) -> Verifier:
    """Return the verifier's facts; PreconditionError naming the key when config.json lacks one."""
    outer = files.read_json(folder / "config.json", fix="give the verifier's folder with --model")
    config = outer.get("text_config") or outer
    try:
        return Verifier(
            folder=folder,
            architecture=(outer.get("architectures") or ["?"])[0],
            model_type=config.get("model_type", "?"),
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            mla=config.get("kv_lora_rank") is not None,
            config=config,
        )
    except KeyError as error:
        raise PreconditionError(
            "the verifier's config.json lacks a value", where=folder / "config.json", expected=f"key {error}"
        ) from None


def weight_map(folder: Path) -> dict[str, str]:
    """Return {tensor name: shard file name} from the index, or from the header of a single file."""
    if (folder / tensor_files.INDEX).exists():
        return tensor_files.weight_map(folder)
    single = folder / tensor_files.SINGLE
    if not single.exists():
        raise PreconditionError(
            "the model has no safetensors weights",
            where=folder,
            expected=f"{tensor_files.SINGLE} or {tensor_files.INDEX}",
            fix="give a complete model folder with --model (only safetensors are loaded)",
        )
    return dict.fromkeys(tensor_files.read_header(single), single.name)


def without_weights(folder: Path) -> bool:
    """Say whether a model folder names shards in its index and has none of them."""
    if not (folder / tensor_files.INDEX).exists() or any(folder.glob("*.safetensors")):
        return False
    return bool(weight_map(folder))


def load_shared_weights(verifier: Verifier, names: tuple[str, ...]) -> "dict[str, torch.Tensor]":
    """Load some of embed_tokens [V, H], lm_head [V, H] and norm [H] in the dtype of the file.

    A tied model's lm_head is its embedding. PreconditionError names what is missing.
    """
    from safetensors import safe_open

    tensors = weight_map(verifier.folder)
    result = {}
    for name in names:
        key = _find(tensors, name, verifier)
        shard = verifier.folder / tensors[key]
        if not shard.exists():
            raise PreconditionError("a weight shard is missing", where=shard, expected=f"it holds {key}")
        with safe_open(shard, framework="pt") as file:
            result[name] = file.get_tensor(key)
    return result


def load_layer_weights(verifier: Verifier, layer: int) -> "dict[str, torch.Tensor]":
    """Load what the files hold of decoder layer `layer`, by the name inside the layer (`mlp.up_proj.weight`)."""
    from safetensors import safe_open

    marker = f"model.layers.{layer}."
    result = {}
    for key, shard in sorted(weight_map(verifier.folder).items()):
        if key.startswith(marker) or f".{marker}" in key:
            with safe_open(verifier.folder / shard, framework="pt") as file:
                result[key.split(marker)[1]] = file.get_tensor(key)
    return result


def _find(tensors: dict[str, str], name: str, verifier: Verifier) -> str:
    wanted = _SUFFIXES["embed_tokens"] if name == "lm_head" and verifier.tied_embeddings else _SUFFIXES[name]
    for suffix in wanted:
        matches = [key for key in tensors if key == suffix or key.endswith("." + suffix)]
        if matches:
            return min(matches, key=len)
    raise PreconditionError(
        f"the verifier's weights lack {name}", where=verifier.folder, expected=" or ".join(wanted)
    )


class TeacherHead:
    """The verifier's final norm and output head, in float32, for checks on a few rows."""

    def __init__(self, verifier: Verifier) -> None:
        weights = load_shared_weights(verifier, ("norm", "lm_head"))
        self._norm, self._head, self._eps = weights["norm"].float(), weights["lm_head"], verifier.rms_norm_eps

    def next_tokens(self, teacher_states: "torch.Tensor") -> "torch.Tensor":
        """Return the most likely next token [n] of teacher states [n, H] (RMSNorm, then the head)."""
        return (self.normed(teacher_states).to(self._head.dtype) @ self._head.T).float().argmax(-1)

    def normed(self, teacher_states: "torch.Tensor") -> "torch.Tensor":
        """Return teacher states [n, H] after the final norm, in float32."""
        states = teacher_states.float()
        return states * (states.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt() * self._norm

    def rows(self, tokens: list[int]) -> "torch.Tensor":
        """Return the head's rows [n, H] of tokens, in float32."""
        return self._head[tokens].float()
