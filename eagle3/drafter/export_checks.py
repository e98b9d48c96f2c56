"""Silent killers: what makes an engine serve a drafter without a word and accept nothing. Each is a named check.

A check is a function of an `Export`; its name is the function's, its docstring the reason. Those here need only
headers and configurations; `eagle3.drafter.weight_checks` has those that read weights.
"""

from collections.abc import Callable
from dataclasses import asdict

from eagle3.common import versions
from eagle3.common.errors import PreconditionError
from eagle3.common.findings import FAIL, OK, WARN, Finding
from eagle3.drafter import config_keys
from eagle3.drafter.checkpoint import EMBEDDING, FROZEN, MAPPING, REQUIRED, Export, canonical_key, expected_shapes
from eagle3.drafter.flat_config import IDS, NO_OFFSET, NORM_FLAGS, captured_ids
from eagle3.drafter.rope_checks import (
    positions_cover_serving,
    rope_as_the_engine_reads_it,
    rope_as_trained,
    rope_spellings_agree,
)
from eagle3.drafter.weight_checks import VALUES

# The oldest version in whose source of Llama drafters each norm flag was found; older ones ignore it.
_FLAG_SINCE: dict[str, dict[str, tuple[int, ...]]] = {
    "norm_before_residual": {"vllm": (0, 16, 0), "speculators": ()},
    "norm_before_fc": {"vllm": (0, 18, 0), "sglang": (0, 5, 17), "speculators": ()},
    "fc_norm": {"vllm": (0, 22, 0), "sglang": (0, 5, 12), "speculators": ()},
    "norm_output": {"vllm": (0, 22, 0), "sglang": (0, 5, 12), "speculators": ()},
}
PLAIN = ("BF16", "F16", "F32", "F64")  # types of weights that mean their own value
_OTHER_COUNTS_SINCE = {"vllm": (0, 18, 0), "sglang": (0, 5, 12)}  # another number of captured layers than three
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator",
                  "LlamaForCausalLM")  # fmt: skip

def run(export: Export, *, values: bool = True) -> list[Finding]:
    """Return the findings of every check; without `values` those that need no weights read."""
    return [finding_of(check, export) for check in (*HEADERS, *(VALUES if values else ()))]


def finding_of(check: Callable[[Export], Finding], export: Export) -> Finding:
    """Return what one check finds, under its name and with its reason; what it cannot read is a failure."""
    reason = " ".join((check.__doc__ or "").split())
    found, name = attempted(lambda: check(export)), check.__name__.replace("_", "-")
    return Finding(**asdict(found) | {"name": name, "reason": reason})


def attempted(check: Callable[[], Finding]) -> Finding:
    """Return what a check finds; a refusal to compute with a value is a failure that says the same."""
    try:
        return check()
    except PreconditionError as error:
        told = [error.what, *(str(error.parts[part]) for part in ("where", "found") if error.parts[part])]
        return Finding(FAIL, ": ".join(told), str(error.parts["expected"]) or "values that it can be computed from",
                       str(error.parts["fix"]) or "put the trained values into config.json")


# --- names, shapes ----------------------------------------------------------------------------------------


def keys_in_one_spelling(export: Export) -> Finding:
    """A file with two spellings of one layer holds two drafters; which is loaded depends on the engine."""
    names = [name.removeprefix("model.") for name in export.tensors]
    both = [prefix for prefix in ("midlayer.", "layers.0.") if any(name.startswith(prefix) for name in names)]
    twice = sorted(name for name in export.tensors if sum(canonical_key(n) == canonical_key(name)
                                                          for n in export.tensors) > 1)
    if len(both) > 1 or twice:
        return Finding(FAIL, "mixes " + " and ".join(both if len(both) > 1 else twice), "one spelling",
                       "keep the set of the last training; an interrupted --in-place leaves the old files as .bak")
    return Finding(OK, both[0] if both else "no layer")


def keys_known_and_complete(export: Export) -> Finding:
    """SGLang skips names it does not know and leaves random what it does not get; acceptance is then near zero."""
    have = export.canonical.keys()
    needed = {*REQUIRED, *(MAPPING if export.reduced else ()), *_norm_keys(export)}
    known = needed | {*MAPPING, EMBEDDING}
    missing = sorted(needed - have)
    unknown = sorted(name for name in export.tensors
                     if canonical_key(name) not in known and not canonical_key(name).startswith(FROZEN))
    if missing or unknown:
        return Finding(FAIL, f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}",
                       "the tensors of a one-layer Llama-type EAGLE-3 drafter", "name a complete checkpoint")
    return Finding(OK, f"{len(export.tensors)} tensors, {len(export.removed)} not shipped")


def _norm_keys(export: Export) -> set[str]:
    return {name for name in expected_shapes(export.flat) if name.startswith(("fc_norm.", "input_norm."))}


def shapes_fit_the_config(export: Export) -> Finding:
    """A config of other sizes loads with random or cut weights in engines that do not compare."""
    shapes, tensors = expected_shapes(export.flat), export.canonical
    wrong = [f"{name}: {tensors[name].shape} instead of {shape}" for name, shape in shapes.items()
             if name in tensors and tensors[name].shape != shape]
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "shapes as config.json says", "give checkpoint and config of one run")
    return Finding(OK, f"hidden size {export.flat['hidden_size']}, draft vocabulary {export.flat['draft_vocab_size']}")


def mapping_types(export: Export) -> Finding:
    """Offsets or masks in other types are cast silently, and a float offset above 256 is rounded in bfloat16."""
    found = {name: export.canonical[name].dtype for name in MAPPING if name in export.canonical}
    wrong = {name: dtype for name, dtype in found.items() if dtype != {"d2t": "I64", "t2d": "BOOL"}[name]}
    return Finding(FAIL if wrong else OK, str(found or "no mapping"), "d2t I64, t2d BOOL" * bool(wrong),
                   "build the mapping again" * bool(wrong))


def weights_are_plain_numbers(export: Export) -> Finding:
    """8-bit and packed weights mean something only with their scales, which no engine takes from a drafter."""
    found = {name: entry.dtype for name, entry in export.canonical.items()
             if name not in MAPPING and entry.dtype not in PLAIN}
    if found:
        return Finding(FAIL, ", ".join(f"{name} {dtype}" for name, dtype in found.items()), " or ".join(PLAIN),
                       "export the weights before they were quantized")
    return Finding(OK, ", ".join(sorted({entry.dtype for entry in export.tensors.values()})))


# --- the verifier and what it shares ----------------------------------------------------------------------


def architecture_known(export: Export) -> Finding:
    """Only one-layer Llama-type drafters are rewritten; an MLA or Qwen3 one would lose what makes it one."""
    config = export.raw.get("transformer_layer_config") or export.raw
    found = (export.raw.get("architectures") or ["?"])[0]
    if config.get("model_type", "llama") != "llama" or found not in (*_ARCHITECTURES, "?"):
        return Finding(FAIL, f"{found}, model_type {config.get('model_type')}", " or ".join(_ARCHITECTURES[:3]),
                       "serve it as it was published")
    layers = export.flat["num_hidden_layers"] if "num_hidden_layers" in config else 1
    if layers != 1:
        return Finding(FAIL, f"{layers} layers", "1 layer", "drafters of more layers are not exported")
    return Finding(OK, found)


def belongs_to_the_verifier(export: Export) -> Finding:
    """The drafter reads the verifier's states and, on SGLang always, its embedding."""
    flat, facts = export.flat, export.verifier
    found = (flat["target_hidden_size"] or flat["hidden_size"], flat["vocab_size"])
    if found != (facts.hidden_size, facts.vocab_size):
        return Finding(FAIL, f"vocabulary {found[1]}, hidden size {found[0]}: another verifier",
                       f"vocabulary {facts.vocab_size}, hidden size {facts.hidden_size}",
                       "give the drafter's own verifier with --model")
    if flat["hidden_size"] != facts.hidden_size and not (export.keeps_embedding and export.engine != "sglang"):
        return Finding(FAIL, f"hidden size {flat['hidden_size']}, so it needs an embedding of its own",
                       f"hidden size {facts.hidden_size}", "serve it on vLLM with --trained-embedding")
    return Finding(OK, f"vocabulary {found[1]}, hidden size {found[0]}")


def embeddings_untied(export: Export) -> Finding:
    """With tied embeddings SGLang takes the embedding for the head and drops lm_head."""
    config = export.raw.get("transformer_layer_config") or export.raw
    if export.raw.get("tie_word_embeddings") or config.get("tie_word_embeddings"):
        return Finding(WARN, "tie_word_embeddings is true beside an lm_head", "false", "false is written")
    return Finding(OK, "tie_word_embeddings false, lm_head shipped")


def config_understood(export: Export) -> Finding:
    """What a config says beyond what is carried over is lost: judged by effect, so a switched-off window is none."""
    effects, unknown = config_keys.lost(export.raw, export.serving_length)
    if effects:
        return Finding(FAIL, "; ".join(f"{name}: {what}" for name, what in effects.items()),
                       "nothing that would be lost", "serve it as it was published, or correct config.json")
    if unknown:
        return Finding(WARN, ", ".join(unknown), "only known keys", "see that they do nothing; they are not written")
    return Finding(OK, f"{len(export.raw)} keys")


def auxiliary_states_counted(export: Export) -> Finding:
    """fc reads as many auxiliary states as there are ids; of EAGLE-1's kind it reads one, which engines do not say."""
    nested, fc = export.raw.get("eagle_config") or {}, export.canonical.get("fc.weight")
    states = export.flat["target_hidden_size"] or export.flat["hidden_size"]
    if nested.get("use_aux_hidden_state") is False:
        return Finding(FAIL, "eagle_config.use_aux_hidden_state false: it reads no auxiliary states", "true",
                       "only drafters with auxiliary states are exported; serve it as it was published")
    width = fc.shape[1] if fc and len(fc.shape) == 2 else 0
    counts = {"ids": len(export.ids), f"width of fc ({width} of {states})": width / states if width else None,
              "num_aux_hidden_states": export.raw.get("num_aux_hidden_states"), IDS: len(export.raw.get(IDS) or ()),
              f"eagle_config.{IDS}": len(nested.get(IDS) or ())}
    told = {name: count for name, count in counts.items() if count}
    if len(set(told.values())) > 1 or not width or width % states:
        return Finding(FAIL, ", ".join(f"{name} {count:g}" for name, count in told.items()) + " auxiliary states",
                       "the same number everywhere", "give config.json and weights of one training")
    return Finding(OK, f"{width // states} ids, fc of {width} columns")


# --- layer ids --------------------------------------------------------------------------------------------


def ids_known(export: Export) -> Finding:
    """Without ids engines capture 2, N//2 and N-3, right only if those were trained (1% acceptance otherwise)."""
    nested = (export.raw.get("eagle_config") or {}).get(IDS)
    if not export.ids:
        return Finding(FAIL, f"only eagle_config {nested}, which engines number differently", "ids at top level",
                       "say which layers were trained: --layers a b c last")
    if export.given_ids or export.trained_ids or export.raw.get(IDS) or nested:
        return Finding(OK, str(export.ids))
    return Finding(WARN, f"none in config.json; taking the engines' default {export.ids}", "ids at top level",
                   "name others with --layers a b c last")


def ids_agree(export: Export) -> Finding:
    """Two lists that mean different layers: each engine reads another one."""
    top, nested = export.raw.get(IDS), (export.raw.get("eagle_config") or {}).get(IDS)
    says = {"--layers": export.given_ids, "config.json": top, "eagle_config": nested}
    wrong = {name: ids for name, ids in says.items() if ids and list(ids) != export.ids}
    if nested and [layer + 1 for layer in nested] == export.ids:
        wrong.pop("eagle_config", None)  # an export for SGLang, or one that numbers outputs
    if wrong:
        return Finding(FAIL, "; ".join(f"{name}: {ids}" for name, ids in wrong.items()), str(export.ids),
                       "leave --layers out or correct it; the ids belong to the training")
    return Finding(OK, str(export.ids))


def ids_match_the_manifest(export: Export) -> Finding:
    """A drafter fed other layers than it was trained on accepts about 1%."""
    if export.trained_ids is None:
        return Finding(OK, "no training manifest beside the checkpoint")
    found = export.raw.get(IDS) or export.ids
    if list(found) != export.trained_ids or export.ids != export.trained_ids:
        return Finding(FAIL, str(list(found)), f"{export.trained_ids}, which training captured",
                       f"put {export.trained_ids} back into config.json")
    return Finding(OK, str(found))


def ids_ascend_inside_the_verifier(export: Export) -> Finding:
    """Engines emit captured layers in ascending order, whatever the list says, and skip those that do not exist."""
    ids, last = export.ids, export.verifier.num_layers - 1
    if ids != sorted(set(ids)) or (ids and not 1 <= ids[0] <= ids[-1] <= last):
        return Finding(FAIL, str(ids), f"ascending, from 1 to {last}", "export with the ids of the training")
    since = _OTHER_COUNTS_SINCE.get(export.engine, ())
    if len(ids) != 3 and _older(export, since):
        return Finding(FAIL, f"{len(ids)} layers", f"3 before {export.engine} {_text(since)}", "take a newer one")
    return Finding(OK, str(ids))


def ids_as_the_engine_reads_them(export: Export) -> Finding:
    """SGLang adds 1 to nested ids, for some verifiers and versions; vLLM reads them as they are."""
    if not export.ids:
        return Finding(FAIL, "no ids", "ids", "see ids-known")
    captured = captured_ids(export.config(), export.engine, export.version, export.verifier)
    if captured != export.ids:
        return Finding(FAIL, f"{export.engine} {export.version or '(newest)'} would capture {captured}",
                       str(export.ids), "this engine cannot be told so; take another, or train on other layers")
    if export.engine == "sglang" and export.version is None and export.verifier.model_type in NO_OFFSET:
        return Finding(WARN, f"{captured}, for 0.5.13 or newer", "a version", "name yours with --engine-version")
    return Finding(OK, f"{captured} from {(export.config().get('eagle_config') or {}).get(IDS, 'the default')}")


# --- norms -----------------------------------------------------------------------------------------------


def norm_flags_served(export: Export) -> Finding:
    """An engine that ignores a norm flag runs another network than the trained one."""
    flags = {name: export.flat[name] for name in NORM_FLAGS}
    wrong = [name for name, value in flags.items() if value
             and (export.engine not in _FLAG_SINCE[name] or _older(export, _FLAG_SINCE[name][export.engine]))]
    if wrong:
        expected = [f"{name}: {_text(_FLAG_SINCE[name].get(export.engine, ())) or 'never'}" for name in wrong]
        return Finding(FAIL, ", ".join(wrong), f"{export.engine} of a version that reads them ({', '.join(expected)})",
                       "serve it with another engine")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        return Finding(FAIL, "norm_before_fc and fc_norm", "at most one of them", "correct config.json")
    return Finding(OK, ", ".join(name for name, value in flags.items() if value) or "all false, and written so")


def norm_flags_match_training(export: Export) -> Finding:
    """vLLM takes an absent norm_before_residual for true in a speculators config, for false in a flat one."""
    found = [name for name in NORM_FLAGS if export.flat[name]]
    if export.trained_here and set(found) != set(export.trained_norms):
        return Finding(FAIL, ", ".join(found) or "all false", ", ".join(export.trained_norms) or
                       "all false: training was without them", "put config.json back")
    nested = export.raw.get("eagle_config") or {}
    absent = [name for name in NORM_FLAGS if name not in export.raw and name not in nested]
    if "norm_before_residual" in absent:
        return Finding(WARN, "norm_before_residual is absent; taken as false", "an explicit value", "false is written")
    return Finding(OK, f"{len(NORM_FLAGS) - len(absent)} explicit")


# --- the engine -------------------------------------------------------------------------------------------


def engine_serves_the_verifier(export: Export) -> Finding:
    """Versions that refuse a drafter for this family do so after loading hundreds of gigabytes."""
    kimi = export.verifier.architecture.startswith("KimiK25")
    family = kimi or export.verifier.model_type in NO_OFFSET
    if export.engine == "vllm" and family and _older(export, (0, 18, 0)):
        return Finding(WARN, f"vLLM {export.version}", "0.18.0 or newer", "apply the patches for this version")
    if export.engine == "sglang" and kimi and _older(export, (0, 5, 10)):
        return Finding(FAIL, f"SGLang {export.version}, which captures no states of Kimi-K2.5", "0.5.10 or newer",
                       "take a newer SGLang")
    return Finding(OK, f"{export.engine} {export.version or '(newest)'} and {export.verifier.architecture}")


def engine_has_no_known_fault(export: Export) -> Finding:
    """Faults of single versions that cost acceptance although the checkpoint is right."""
    if export.engine == "sglang" and _older(export, (0, 5, 11)):
        return Finding(WARN, "up to 0.5.10 the fused all-reduce captures states before the reduction", "a newer one",
                       "start it with --enforce-disable-flashinfer-allreduce-fusion when tensor parallel")
    if export.engine == "vllm" and _older(export, (0, 17, 0)):
        return Finding(WARN, "0.16 keeps its compile cache when ids change", "a newer one",
                       "set VLLM_DISABLE_COMPILE_CACHE=1 or clear the cache")
    return Finding(OK, "none known")


def _older(export: Export, version: tuple[int, ...]) -> bool:
    return export.version is not None and versions.numbers(export.version) < version


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


HEADERS: tuple[Callable[[Export], Finding], ...] = (
    keys_in_one_spelling, keys_known_and_complete, shapes_fit_the_config, mapping_types, weights_are_plain_numbers,
    architecture_known, belongs_to_the_verifier, embeddings_untied, config_understood, auxiliary_states_counted,
    ids_known, ids_agree, ids_match_the_manifest,
    ids_ascend_inside_the_verifier, ids_as_the_engine_reads_them, norm_flags_served, norm_flags_match_training,
    rope_spellings_agree, rope_as_trained, rope_as_the_engine_reads_it, positions_cover_serving,
    engine_serves_the_verifier,
    engine_has_no_known_fault,
)  # fmt: skip
