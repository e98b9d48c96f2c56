"""One spelling of a verifier's config.json, whatever its own.

What the file leaves open is asked of transformers' configuration class, in a process of its own that finds no torch (2
seconds, and only then): a missing `tie_word_embeddings` means true for one family and false for another. A model that
transformers does not know is read as it stands.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.drafter import output
from eagle3.drafter.angles import frequencies
from eagle3.drafter.rope import fresh_rope, rope_of

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_attention_heads",
          "intermediate_size")  # fmt: skip
_HEADS = ("num_key_value_heads", "head_dim")
EPS = "rms_norm_eps"
_EPS_NAMES = (EPS, "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
_TIED = "tie_word_embeddings"
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_PATIENCE_S = 120
_ASK = """
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
parts, names = json.load(sys.stdin)
for part in parts:
    try:
        whole = CONFIG_MAPPING[part["model_type"]].from_dict(part)
        text = whole.get_text_config()
        said = {name: getattr(text, name, getattr(whole, name, None)) for name in names}
        print(json.dumps(said, default=str))
        break
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
"""


def text_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (config.json as it is, its text part in one spelling).

    The text part then has all of hidden_size, num_hidden_layers, vocab_size, max_position_embeddings,
    num_attention_heads, num_key_value_heads, head_dim, intermediate_size (numbers), rms_norm_eps (whatever the norm is
    called), tie_word_embeddings, model_type, and flat rope_parameters beside rope_theta.
    Raises PreconditionError naming at once all that neither the file nor its class tells.
    """
    where = folder / "config.json"
    whole = files.read_json(where, fix="give the verifier's folder with --model")
    if not isinstance(whole, dict):
        raise PreconditionError("not a model's config.json", where=where, expected="an object",
                                found=type(whole).__name__)
    inside = next((whole[name] for name in _TEXT_PARTS if isinstance(whole.get(name), dict)), whole)
    text = dict(inside)
    if text.get(_TIED) is None and whole.get(_TIED) is not None:
        text[_TIED] = whole[_TIED]
    _fill(text, [whole, inside] if inside is not whole else [whole])
    _require(text, where)
    return whole, text


def _fill(text: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Fill in what the text part leaves open: from the class where it is known, else what derives from the rest."""
    wanted = _open(text)
    if wanted:
        asked = [*wanted, *(_EPS_NAMES if EPS in wanted else ()), *(_ROPE if "rope_theta" in wanted else ())]
        told = {name: value for name, value in class_says(parts, asked).items() if value is not None}
        if "rope_theta" in wanted and "rope_parameters" in told:  # the class has read the file's own scaling too
            text.pop("rope_scaling", None)
            text["rope_parameters"] = told["rope_parameters"]
        text |= {name: value for name, value in told.items() if name not in _ROPE[:2]}
    for name in _EPS_NAMES:
        if text.get(EPS) is None and text.get(name) is not None:
            text[EPS] = text[name]
    if text.get("num_key_value_heads") is None:
        text["num_key_value_heads"] = text.get("num_attention_heads")
    if text.get("head_dim") is None and _whole(text.get("hidden_size")) and _whole(text.get("num_attention_heads")):
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text[_TIED] = bool(text.get(_TIED))


def _open(text: dict[str, Any]) -> list[str]:
    """Return what the text part does not say itself and its class may know."""
    wanted = [name for name in ("model_type", *_SIZES, _TIED) if text.get(name) is None]
    wanted += [name for name in output.keys_of(str(text.get("model_type"))) if name not in text]
    if all(text.get(name) is None for name in _EPS_NAMES):
        wanted.append(EPS)
    if text.get("kv_lora_rank") is None:  # the heads of MLA are its own
        wanted += [name for name in _HEADS if text.get(name) is None]
    if _rope(text) and rope_of(text | {"rope_theta": text.get("rope_theta") or -1.0})["rope_theta"] == -1.0:
        wanted.append("rope_theta")
    return wanted


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Return flat rope_parameters, empty where the file's cannot be understood."""
    try:
        rope = rope_of(text)
        drafters = fresh_rope(text)
        if drafters["rope_type"] != "default":
            frequencies(drafters, 128)
        return rope
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, PreconditionError):
        return {}


def _require(text: dict[str, Any], where: Path) -> None:
    """Refuse, all at once, what is missing or no number; spell RoPE flat."""
    for name in (*_SIZES, *_HEADS):
        if isinstance(text.get(name), float) and text[name].is_integer():
            text[name] = int(text[name])
    missing = [name for name in (*_SIZES, EPS) if text.get(name) is None]
    if missing:
        raise PreconditionError(
            "the verifier's config.json lacks values, and transformers does not know its defaults", where=where,
            expected=f"keys {', '.join(missing)}", found=f"model_type {text.get('model_type')}",
            fix="add them, or update transformers if it has this model by now")
    wrong = {name: text[name] for name in (*_SIZES, *_HEADS) if text.get(name) is not None and not _whole(text[name])}
    if not isinstance(text[EPS], float | int) or not 0 <= text[EPS] < 1:
        wrong[EPS] = text[EPS]
    if (rope := _rope(text)).get("rope_theta", 0) <= 0:
        wrong["rope_parameters"] = {name: text[name] for name in _ROPE if text.get(name) is not None}
    if wrong:
        raise PreconditionError("the verifier's config.json has values that are no sizes", where=where,
                                expected="positive numbers",
                                found=", ".join(f"{name}: {value!r}" for name, value in wrong.items()))
    text.pop("rope_scaling", None)
    text |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "model_type": text.get("model_type") or "?"}


def class_says(parts: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return what transformers' configuration class of the first part that it knows has for `names`; empty if none.

    No code of the model is run and nothing is looked up in a network.
    """
    return json.loads(_class_says(json.dumps([parts, names], sort_keys=True)))


@functools.lru_cache(maxsize=64)
def _class_says(question: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        result = subprocess.run([sys.executable, "-c", _ASK], input=question, capture_output=True, text=True,
                                env=environment, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("transformers could not be asked about config.json: %s", error)
        return "{}"
    logger.debug("transformers about config.json: %s %s", result.stdout.strip(), result.stderr.strip()[-300:])
    return (result.stdout.strip().splitlines() or ["{}"])[-1] if result.returncode == 0 else "{}"
