"""What the verifier's own files say: sizes, layers, RoPE, and the few weights a drafter shares with it.

The facts come from config.json alone, so a dry run answers for a model whose weights are elsewhere. Weights are found
by their role: beside which decoder they stand, not how their names end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.common import tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.drafter import model_config
from eagle3.drafter.output import Output, output_of

if TYPE_CHECKING:
    import torch

_EMBEDDINGS = ("embed_tokens", "word_embeddings", "tok_embeddings", "wte")
_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f", "norm_f")
_HEADS = ("lm_head", "output", "embed_out")
_PLAIN = ("BF16", "F16", "F32")
_LAYER = re.compile(r"(.*?)layers\.(\d+)\.")
NORM_BIAS = "norm_bias"


@dataclass(frozen=True)
class Verifier:
    """Facts of a verifier; sizes in elements, lengths in tokens.

    Attributes:
        config: the text part of config.json in one spelling (see `model_config.text_config`).
        mla: whether attention is multi-head latent (DeepSeek, Kimi), so that heads do not carry over.
        rms_norm_eps: of its final norm, whatever kind that is. output: how logits come out of it.
        tied_embeddings: as its configuration says; a head that the files lack is the embedding all the same.
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
    output: Output
    config: dict[str, Any]

    def layers(self, requested: list[int]) -> list[int]:
        """Return the four captured layers: three auxiliary ids and the last decoder layer's index.

        Auxiliary id k is the residual stream entering decoder layer k (the convention of vLLM, speculators
        and SGLang inside); the last entry N-1 is that layer's output before the final norm. N is accepted
        for it, because engines number that same stream so.
        """
        last = self.num_layers - 1
        if not requested:
            chosen = [2, self.num_layers // 2, self.num_layers - 3, last]
            if chosen != sorted(set(chosen)):
                raise PreconditionError(
                    "the model has too few layers for the engines' default ids", where=self.folder,
                    expected="7 layers or more, for 2, N/2 and N-3 to ascend", found=f"{self.num_layers}: {chosen}",
                    fix=f"name them with --layers A B C {last} (A < B < C <= {last}; or fewer), model.layers in YAML")
            return chosen
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
    """Return the verifier's facts; PreconditionError naming what config.json lacks, or why its family is refused."""
    whole, text = model_config.text_config(folder)
    architectures = whole.get("architectures")
    return Verifier(
        folder=folder,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "?",
        model_type=str(text["model_type"]),
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        max_positions=text["max_position_embeddings"],
        rms_norm_eps=float(text[model_config.EPS]),
        tied_embeddings=text["tie_word_embeddings"],
        mla=text.get("kv_lora_rank") is not None,
        output=output_of(text, folder / "config.json"),
        config=text,
    )


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


def decoder_prefix(tensors: Iterable[str], verifier: Verifier) -> str:
    """Return what stands before `layers.0.` in the names of the decoder's tensors (`model.language_model.`).

    The decoder is the list that has all of the verifier's layers (and perhaps more, for multi-token prediction) and a
    token embedding beside it. Raises PreconditionError naming the lists found when there is none.
    """
    lists: dict[str, set[int]] = {}
    beside = set()
    for name in tensors:
        if match := _LAYER.match(name):
            lists.setdefault(match[1], set()).add(int(match[2]))
        else:
            beside.add(name)
    fits = [prefix for prefix, layers in lists.items() if layers.issuperset(range(verifier.num_layers))
            and any(f"{prefix}{name}.weight" in beside for name in _EMBEDDINGS)]
    if not fits:
        raise PreconditionError(
            "the verifier's weights have no decoder as its config.json says", where=verifier.folder,
            expected=f"…layers.0 to {verifier.num_layers - 1}, with embed_tokens.weight beside them",
            found=", ".join(f"{prefix}layers: {len(layers)}" for prefix, layers in lists.items()) or "no layers",
            fix="check that config.json and weights are of one model")
    return min(fits, key=len)


def shared_names(tensors: Iterable[str], verifier: Verifier) -> dict[str, str]:
    """Return {role: tensor name} of embed_tokens, norm (norm_bias) and lm_head among the names of a verifier's files.

    A head that the files lack, or that the configuration ties, is the embedding. PreconditionError names all that is
    missing, and a head of which there is more than plain numbers (quantized, or with a bias).
    """
    names = set(tensors)
    prefix = decoder_prefix(names, verifier)
    embeddings = (f"{prefix}{name}.weight" for name in _EMBEDDINGS)
    found = {"embed_tokens": next(name for name in embeddings if name in names)}
    norm = next((name for name in _NORMS if f"{prefix}{name}.weight" in names), None)
    if norm is None:
        raise PreconditionError("the verifier's weights have no final norm", where=verifier.folder,
                                expected=f"{prefix}norm.weight",
                                fix="a norm without weights, or of another name, is not known here")
    found["norm"] = f"{prefix}{norm}.weight"
    if f"{prefix}{norm}.bias" in names:
        if not verifier.output.layer_norm:
            raise PreconditionError("the verifier's final norm has a bias", where=verifier.folder,
                                    found=f"{prefix}{norm}.bias, model_type {verifier.model_type}",
                                    expected="an RMS norm, or a family of LAYER_NORMS in eagle3/drafter/output.py")
        found[NORM_BIAS] = f"{prefix}{norm}.bias"
    return found | {"lm_head": found["embed_tokens"] if verifier.tied_embeddings else _head(names, prefix, verifier)
                    or found["embed_tokens"]}


def _head(names: set[str], prefix: str, verifier: Verifier) -> str | None:
    parts = prefix.split(".")[:-1]
    outside = [".".join([*parts[:depth], ""]) for depth in range(len(parts), -1, -1)]
    for head in (above + name for above in outside for name in _HEADS):
        own = sorted(name for name in names if name.startswith(head + "."))
        if own and own != [f"{head}.weight"]:
            raise PreconditionError(
                "the verifier's head is more than plain numbers", where=verifier.folder, found=", ".join(own),
                expected=f"{head}.weight alone: a quantized head, or one with a bias, is not computed here",
                fix="take a checkpoint whose head is not quantized")
        if own:
            return own[0]
    return None


def shared_entries(verifier: Verifier) -> dict[str, tensor_files.Entry]:
    """Return where the shared weights lie, from index and headers; {role: entry} as in `shared_names`.

    PreconditionError names all that later stages would stumble over: shards that are not there, types other than
    bfloat16, float16 and float32, shapes other than [V, H] and [H].
    """
    files_of = weight_map(verifier.folder)
    names = shared_names(files_of, verifier)
    shards = {files_of[name] for name in names.values()}
    headers = {shard: tensor_files.read_header(verifier.folder / shard) for shard in shards}
    lost = [f"{files_of[name]} lacks {name}" for name in names.values() if name not in headers[files_of[name]]]
    entries = {role: headers[files_of[name]][name] for role, name in names.items() if not lost}
    matrix, vector = (verifier.vocab_size, verifier.hidden_size), (verifier.hidden_size,)
    wrong = [f"{names[role]}: {entry.dtype} {list(entry.shape)}, not {list(shape)} of {', '.join(_PLAIN)}"
             for role, entry in entries.items() for shape in [vector if role.startswith("norm") else matrix]
             if entry.shape != shape or entry.dtype not in _PLAIN]
    if lost or wrong:
        raise PreconditionError("the verifier's embedding, norm or head is not as its config.json says",
                                where=verifier.folder, found="\n".join(lost or wrong),
                                expected=f"vocabulary {verifier.vocab_size}, hidden size {verifier.hidden_size}",
                                fix="check that config.json and weights are of one model, whose head is not quantized")
    return entries


def load_shared_weights(verifier: Verifier, names: tuple[str, ...]) -> "dict[str, torch.Tensor]":
    """Load some of embed_tokens [V, H], lm_head [V, H] and norm [H] (a layer norm's with norm_bias [H]).

    As a plain norm and a plain matrix use them: a norm stored as w of 1 + w, or a scale of the logits, is in the
    weights (float32 then); else they are in the dtype of the file. A soft cap is not in them (`verifier.output`).
    """
    shared = {role: entry for role, entry in shared_entries(verifier).items()
              if role in names or (role == NORM_BIAS and "norm" in names)}
    table = shared_names(weight_map(verifier.folder), verifier)
    result = {role: _read(entry.file, table[role]) for role, entry in shared.items()}
    how = verifier.output
    if "norm" in result and how.norm_offset:
        result["norm"] = result["norm"].float() + how.norm_offset
    if "norm" in result and how.layer_norm:
        bias = result.get(NORM_BIAS)
        result[NORM_BIAS] = bias.float() if bias is not None else result["norm"].new_zeros(verifier.hidden_size).float()
    if how.scale != 1.0 and "lm_head" in result:
        result["lm_head"] = result["lm_head"].float() * how.scale
    return result


def load_layer_weights(verifier: Verifier, layer: int) -> "dict[str, torch.Tensor]":
    """Load what the files hold of decoder layer `layer` in plain numbers, by the name inside the layer
    (`mlp.up_proj.weight`); norms are as a plain norm uses them."""
    tensors = weight_map(verifier.folder)
    prefix = f"{decoder_prefix(tensors, verifier)}layers.{layer}."
    result = {}
    for name in sorted(tensors):
        if name.startswith(prefix):
            weight = _read(verifier.folder / tensors[name], name)
            if weight.is_floating_point() and weight.element_size() > 1:
                norm = name.endswith("norm.weight") and verifier.output.norm_offset
                result[name.removeprefix(prefix)] = weight.float() + norm if norm else weight
    return result


def _read(shard: Path, name: str) -> "torch.Tensor":
    from safetensors import safe_open

    with safe_open(shard, framework="pt") as file:
        return file.get_tensor(name)
