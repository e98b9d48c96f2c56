"""Drafter checkpoints as they are published and as each engine loads them: tensor names, and what is shipped.

Engines differ in the layer's prefix (`midlayer.` or `layers.0.`) and in what they do with names they do not know:
SGLang up to 0.5.11 skips them silently. What can go wrong is checked in `eagle3.drafter.export_checks`.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.common import files, proofs, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.tensor_files import Entry
from eagle3.drafter.flat_config import IDS, NORM_FLAGS, engine_config, flat_config, ids_of
from eagle3.drafter.verifier import Verifier, read, shared_entries

# Parameters of Eagle3DraftModel that are the verifier's and never trained or shipped.
FROZEN = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")
# Spellings of published checkpoints → this project's, applied in this order.
SPELLINGS = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
# This project's spelling → what an engine loads; `midlayer.` is accepted by every version of both servers.
LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "vllm": (("layers.0.", "midlayer."),),
    "sglang": (("layers.0.", "midlayer."),),
    "speculators": (),
}
_LAYER_KEYS = (
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
MAPPING = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"
CHECKSUMS = "checksums.json"  # of a checkpoint's files, which stage 04 writes last
TRAINING = "trainer.json"  # what stage 04 writes beside the weights: counters, figures, the layers of the states
_ANOTHER = ("take another checkpoint of that training with --checkpoint, or restore this one from a copy; 04_train.py "
            "with the same options in another --out makes it anew")
REQUIRED = ("fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{key}" for key in _LAYER_KEYS))


@dataclass(frozen=True)
class Export:
    """A checkpoint and what is to become of it.

    Attributes:
        raw: its config.json. tensors: what its files hold, by name there.
        engine: vllm, sglang or speculators. version: of the engine; None means the newest.
        serving_length: tokens that the drafter's positions have to cover.
        given_ids: auxiliary ids that the user named, in the project's convention; empty if none.
        trained_ids: those that the checkpoint's training recorded; None without a record.
        trained_here: whether stage 04 made the checkpoint. trained_norms: the norm flags that it trained with.
        keeps_embedding: the user says that the checkpoint's own embedding was trained.
    """

    folder: Path
    raw: dict[str, Any]
    tensors: dict[str, Entry]
    verifier: Verifier
    engine: str
    version: str | None
    serving_length: int
    given_ids: list[int] = field(default_factory=list)
    trained_ids: list[int] | None = None
    trained_here: bool = False
    trained_norms: list[str] = field(default_factory=list)
    keeps_embedding: bool = False

    @functools.cached_property
    def flat(self) -> dict[str, Any]:
        """The checkpoint's own configuration with every value spelled out."""
        return flat_config(self.raw, self.canonical)

    @functools.cached_property
    def canonical(self) -> dict[str, Entry]:
        """The tensors by canonical name."""
        return {canonical_key(name): entry for name, entry in self.tensors.items()}

    @property
    def reduced(self) -> bool:
        """Whether the drafter proposes from a part of the vocabulary."""
        return self.flat["draft_vocab_size"] != self.flat["vocab_size"]

    @property
    def ids(self) -> list[int]:
        """The auxiliary ids in the project's convention, from the best source; empty if the config is ambiguous."""
        return self.given_ids or self.trained_ids or ids_of(self.raw, self.verifier.num_layers) or []

    @property
    def as_written(self) -> bool:
        """Whether config.json is what stage 04 or 05 wrote there, by the checksum that it left."""
        beside, above = self.folder / CHECKSUMS, self.folder.resolve().parent / "manifest.json"
        known = files.read_json(beside).get("config.json") if beside.is_file() else None
        if known is None and above.is_file():
            known = ((files.read_json(above).get("outputs") or {}).get("config.json") or {}).get("sha256")
        return known is not None and files.sha256_file(self.folder / "config.json") == known

    @property
    def removed(self) -> list[str]:
        """Names in the files of tensors that are not shipped: the verifier's own, and a mapping of everything."""
        frozen = FROZEN[1:] if self.keeps_embedding or self.engine == "speculators" else FROZEN
        unneeded = () if self.reduced else MAPPING
        return [name for name in self.tensors if canonical_key(name).startswith(frozen)
                or canonical_key(name) in unneeded]

    @property
    def table(self) -> dict[str, str]:
        """{name in the files: name for the engine} of everything shipped."""
        return engine_names(self.tensors.keys() - set(self.removed), self.engine)

    @property
    def shipped(self) -> dict[str, Entry]:
        """What is written, by the engine's names.

        speculators leaves an embedding that the checkpoint lacks as whatever the memory holds, so it gets the
        verifier's.
        """
        shipped = {name: self.tensors[key] for key, name in self.table.items()}
        if self.engine == "speculators" and EMBEDDING not in shipped:
            shipped[EMBEDDING] = embedding_of(self.verifier.folder)
        return shipped

    def config(self) -> dict[str, Any]:
        """Return the config.json to write."""
        return engine_config(self.flat | {IDS: self.ids}, engine=self.engine, version=self.version,
                             verifier=self.verifier, serving_length=self.serving_length,
                             keeps_embedding=self.keeps_embedding)


def canonical_key(key: str) -> str:
    """Return a tensor name in this project's spelling (`layers.0.`, no `model.` prefix)."""
    for theirs, ours in SPELLINGS:
        if key.startswith(theirs):
            key = ours + key.removeprefix(theirs)
    return key


def engine_key(key: str, engine: str = "vllm") -> str:
    """Return a canonical name as the engine loads it."""
    for ours, theirs in LAYOUTS[engine]:
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def engine_names(keys: Iterable[str], engine: str) -> dict[str, str]:
    """Return {name in the file: name for the engine}, in the order of the names."""
    return {key: engine_key(canonical_key(key), engine) for key in sorted(keys)}


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: shape} of everything that a drafter of this flat config may hold."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, states = config["head_dim"], config.get("target_hidden_size") or hidden
    auxiliary = config.get("num_aux_hidden_states") or 3
    layer = {
        **dict.fromkeys(_LAYER_KEYS[:3], (hidden,)),
        "self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    norms = {f"fc_norm.{i}.weight": (states,) for i in range(auxiliary)} if config.get("fc_norm") else {}
    if config.get("norm_before_fc"):
        norms["input_norm.weight"] = (auxiliary * states,)
    return {
        "fc.weight": (hidden, auxiliary * states),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "d2t": (config["draft_vocab_size"],),
        "t2d": (config["vocab_size"],),
        EMBEDDING: (config["vocab_size"], hidden),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
        **norms,
    }


def embedding_of(folder: Path) -> Entry:
    """Return where a verifier's embedding lies, from index and headers; PreconditionError when it is not there."""
    return shared_entries(read(folder))["embed_tokens"]


def training_record(checkpoint: Path) -> tuple[list[int] | None, bool]:
    """Return (auxiliary ids of the states that a checkpoint was trained on, whether stage 04 made it).

    Stage 04 writes both into the checkpoint itself, since config.json is what may have been changed.
    """
    path = checkpoint / TRAINING
    if not path.is_file():
        return None, False
    counters = files.read_json(path, fix=_ANOTHER)
    layers = counters.get("layers") if isinstance(counters, dict) else counters
    if not isinstance(counters, dict) or not (layers is None or isinstance(layers, list)) or not all(
            isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers or ()):
        raise PreconditionError("not what stage 04 writes", where=path, expected="layers: a list of layer numbers",
                                found=f"{layers!r:.80}", fix=_ANOTHER)
    return (layers[:-1] if layers else None), True


def trained_norms(checkpoint: Path) -> list[str]:
    """Return the norm flags that stage 04 trained a checkpoint with; none where it does not say, as before it could."""
    counters = files.read_json(checkpoint / TRAINING, fix=_ANOTHER) if (checkpoint / TRAINING).is_file() else {}
    norms = counters.get("norms") or [] if isinstance(counters, dict) else []
    if not isinstance(norms, list) or not set(map(str, norms)) <= set(NORM_FLAGS):
        raise PreconditionError("not what stage 04 writes", where=checkpoint / TRAINING,
                                expected="norms: some of " + ", ".join(NORM_FLAGS), found=f"{norms!r:.80}",
                                fix=_ANOTHER)
    return [str(name) for name in norms]


def prove(checkpoint: Path, cache: Path | None = None) -> None:
    """Compare what is exported of a checkpoint with the checksums that stage 04 wrote beside it, if it did.

    A gigabyte takes about a second, once: `cache` remembers it (see `proofs`). PreconditionError names the file.
    """
    path = checkpoint / CHECKSUMS
    made_here = (checkpoint / TRAINING).is_file()
    if not path.is_file():
        if made_here:
            raise PreconditionError("a checkpoint has no checksums", where=path, expected="a file", found="none",
                                    fix=_ANOTHER)
        return
    recorded = files.read_json(path, fix=_ANOTHER)
    digests = recorded if isinstance(recorded, dict) else {}
    names = ("config.json", tensor_files.SINGLE, *((TRAINING,) if made_here else ()))
    if made_here and not all(isinstance(digests.get(name), str) for name in names):
        raise PreconditionError("the checksums of a checkpoint are not whole", where=path, expected=", ".join(names),
                                found=f"{recorded!r:.80}", fix=_ANOTHER)
    told = {name: digests[name] for name in names if isinstance(digests.get(name), str)}
    proofs.require({checkpoint / name: {"sha256": digest} for name, digest in told.items()}, cache=cache, fix=_ANOTHER)
