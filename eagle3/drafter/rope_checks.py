"""Checks of a drafter's RoPE as angles: as it was trained, as it is written, and as each engine reads that."""

from typing import Any

from eagle3.common import versions
from eagle3.common.findings import FAIL, OK, WARN, Finding
from eagle3.drafter import angles
from eagle3.drafter.checkpoint import Export
from eagle3.drafter.flat_config import layer_shape

_YARN_MSCALE_SINCE = (0, 5, 13)  # SGLang up to 0.5.12 does not read it
_TRANSFORMERS_5_SINCE = {"vllm": (0, 18, 0), "sglang": (0, 5, 10)}  # before, only the older spelling was read


def rope_spellings_agree(export: Export) -> Finding:
    """Older engines read rope_theta and rope_scaling, newer ones rope_parameters; two values are two drafters."""
    config = _layer(export.raw)
    if not any(config.get(name) for name in ("rope_parameters", "rope_theta", "rope_scaling")):
        theta = export.flat["rope_parameters"]["rope_theta"]
        return Finding(WARN, f"no theta; {theta:g} is written, which engines would take", "a theta",
                       "add the trained one to config.json")
    ropes = {"rope_parameters": angles.normal({k: v for k, v in config.items() if k != "rope_scaling"}, "new"),
             "rope_theta and rope_scaling": angles.normal(config, "old")}
    new = config.get("rope_parameters") or {}
    if "rope_theta" not in config and "rope_scaling" not in config:
        del ropes["rope_theta and rope_scaling"]
    elif not new:
        del ropes["rope_parameters"]
    elif "rope_scaling" not in config:  # then only theta is told twice
        ropes["rope_theta and rope_scaling"] = ropes["rope_parameters"] | {"rope_theta": float(config["rope_theta"])}
    own = angles.normal(export.flat)
    for name, each in ropes.items():
        if parts := _parts(each, own, export):
            old = f"rope_theta {config.get('rope_theta')}, rope_scaling {config.get('rope_scaling')}"
            return Finding(FAIL, f"rope_parameters {new}; {old}: {name} and what is exported part at {parts}",
                           "the same in both", "keep the one that was trained")
    return Finding(OK, f"{own['rope_type']}, theta {own['rope_theta']:g}, written in both spellings")


def rope_as_trained(export: Export) -> Finding:
    """Another theta or scaling turns positions into garbage further and further along."""
    expected = angles.normal({"max_position_embeddings": export.verifier.max_positions}
                           | {"rope_parameters": layer_shape(export.verifier)["rope_parameters"]})
    found = angles.normal(export.flat)
    parts = _parts(found, expected, export)
    if not parts:
        return Finding(OK, f"the verifier's theta {expected['rope_theta']:g}, {expected['rope_type']}")
    if export.trained_here and export.as_written:  # training went on from a published drafter
        return Finding(OK, f"{found}, as training wrote it")
    if export.trained_here:
        return Finding(FAIL, f"{found}; they part at {parts}", f"{expected}, with which stage 04 trains",
                       "put config.json back")
    return Finding(WARN, f"{found}; they part at {parts}", f"{expected} as a rule",
                   "check what the drafter was trained with")


def rope_as_the_engine_reads_it(export: Export) -> Finding:
    """An engine takes RoPE from its own place and leaves out values that it does not know."""
    written, own = _layer(export.config()), angles.normal(export.flat)
    for spelling in _spellings(export):
        read = as_read(written, spelling, export)
        if parts := _parts(read, own, export):
            long = own["rope_type"] == "longrope"
            return Finding(WARN if long else FAIL, f"{export.engine} {export.version or '(newest)'} reads {read}: they "
                           f"part at {parts}", str(own), f"serve at most {own.get('original_max_position_embeddings')} "
                           "tokens, or measure it" if long else "serve it with another engine or a newer one")
    return Finding(OK, f"{own['rope_type']}, theta {own['rope_theta']:g}, read as it is written")


def positions_cover_serving(export: Export) -> Finding:
    """Past a drafter's max_position_embeddings vLLM before 0.27 drafts garbage without a word."""
    own, wanted = export.flat["max_position_embeddings"], export.serving_length
    if own >= wanted:
        return Finding(OK, f"{own} for {wanted}")
    if angles.normal(export.flat)["rope_type"] in ("dynamic", "longrope"):
        return Finding(FAIL, f"{own} with RoPE that depends on it", f"at least {wanted}", "name a smaller "
                       "--serving-length")
    return Finding(WARN, f"{own}; {wanted} is written", f"at least {wanted}",
                   "acceptance past the trained length is to be measured")


def as_read(config: dict[str, Any], spelling: str, export: Export) -> angles.Rope:
    """Return the rope that an engine computes with for this config: get_rope of vLLM 0.32 and SGLang 0.5.9 to 0.5.23.

    Both take original_max_position_embeddings where transformers does. LongRoPE's factor comes from the positions in
    both, and vLLM takes the long divisors for every length when sequences may become long. SGLang knows
    attention_factor under another name, and scales dynamic NTK for the longest sequence always.
    """
    read = angles.normal(config, spelling)
    if read["rope_type"] == "longrope":
        read = {name: value for name, value in read.items() if name not in ("factor", "attention_factor")}
        if export.engine == "vllm" and export.serving_length > read.get("original_max_position_embeddings", 0):
            read["short_factor"] = read["long_factor"]
    if export.engine != "sglang":
        return read
    if read["rope_type"] == "dynamic":
        factor, dim = read["factor"], export.flat["head_dim"]
        stretched = read["rope_theta"] * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
        return {"rope_type": "default", "rope_theta": stretched}
    ignored = {"attention_factor"} | ({"mscale", "mscale_all_dim"} if export.version is not None
                                      and versions.numbers(export.version) < _YARN_MSCALE_SINCE else set())
    return {name: value for name, value in read.items() if name not in ignored}


def _spellings(export: Export) -> list[str]:
    """Return how this engine reads a config: which transformers it has decides for versions in between."""
    since = _TRANSFORMERS_5_SINCE.get(export.engine)
    old = since is not None and export.version is not None and versions.numbers(export.version) < since
    return ["old", "new"] if old else ["new"]


def _parts(a: angles.Rope, b: angles.Rope, export: Export) -> str:
    return angles.difference(a, b, export.flat["head_dim"], export.serving_length)


def _layer(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("transformer_layer_config") or config
