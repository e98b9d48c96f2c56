"""The known causes of low acceptance, in the order in which to suspect them, each judged by what a run left behind.

A cause is a function of a `Run` that yields its evidence; its docstring is the cause's name. One piece of evidence
that says found is enough; without any, one that says remains keeps the cause open; otherwise it is ruled out.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eagle3.checks.measured_run import NOT_TRAINED, Run
from eagle3.checks.similarity import Mean, beyond, coverage, edge_shares, pair_shares
from eagle3.common import tensor_files, versions
from eagle3.common.findings import FAIL, WARN
from eagle3.drafter.checkpoint import EMBEDDING, MAPPING, REQUIRED, canonical_key
from eagle3.drafter.flat_config import IDS, NORM_FLAGS
from eagle3.engines import arguments

FOUND, OUT, REMAINS = "found", "ruled out", "remains"
EXPORT_AGAIN = "export it again with 05_fix_weight_keys.py"
_HEAD = ("lm_head.weight", *MAPPING)
# Keys of a drafter's config by the cause that they belong to; every other key belongs to the loader's.
_ID_KEYS = (IDS, "num_aux_hidden_states")
_POSITION_KEYS = ("rope_parameters", "max_position_embeddings")
_NORM_KEYS = (*NORM_FLAGS, "rms_norm_eps")
_HEAD_KEYS = ("draft_vocab_size", "vocab_size", "tie_word_embeddings")
_TYPICAL = 0.9  # share of traces whose prompts begin (or end) alike, from which it is the template's doing
_DROP = 0.1  # fall of a share that bears on acceptance


@dataclass(frozen=True)
class Item:
    """One piece of evidence: found, ruled out or remains, and what to do."""

    status: str
    text: str
    fix: str = ""


Evidence = Iterator[Item]


def auxiliary_ids(run: Run) -> Evidence:
    """auxiliary layer ids"""
    trained, captured, asked = run.served.trained_ids, run.log.captured, run.option("model", "layers")
    if trained is None:
        yield Item(REMAINS, "neither the checkpoint nor a manifest says which layers were trained",
                   "compare config.json with the training's --layers")
        return
    if captured and captured != trained:
        yield Item(FOUND, f"the engine's log: it captures layers {captured}; trained were {trained}", EXPORT_AGAIN)
    if asked and run.served.verifier.layers(asked)[:-1] != trained:
        yield Item(FOUND, f"the prediction captured layers {asked[:-1]}; trained were {trained}",
                   "put model.layers back to those of stage 02 and measure again")
    yield from _checks(run, "ids-as-served", "ids-known", "ids-agree", "ids-ascend-inside-the-verifier")
    if captured:
        yield Item(OUT, f"trained, exported and named by the engine's log: {trained}")
    elif run.attached:
        yield Item(REMAINS, "which layers the attached server captures is not known",
                   "grep 'auxiliary layers' in its log, or let stage 06 start the server")
    else:
        yield Item(OUT, f"{trained} in config.json, as {_engine(run)} reads it")


def embedding(run: Run) -> Evidence:
    """an embedding that is not the verifier's"""
    fix = "remove embed_tokens.weight from the export: 05_fix_weight_keys.py leaves it out"
    yield from _checks(run, "embedding-is-the-verifiers")
    own = EMBEDDING in run.served.canonical
    if run.log.says("with distinct embed_tokens weights") and not run.served.keeps_embedding:
        yield Item(FOUND, "the engine's log: distinct embed_tokens weights", fix)
    elif own and run.served.keeps_embedding:
        yield Item(OUT, "declared as trained" if run.served.engine == "vllm" else "the engine takes the verifier's")
    else:
        shared = run.log.says("without its own embed_tokens|embed_tokens identical")
        yield Item(OUT, ("equal to the verifier's" if own else "the drafter ships none")
                   + "; the engine's log: the verifier's is shared" * bool(shared))


def loader(run: Run) -> Evidence:
    """keys that the loader skips, or weights that are not the training's"""
    served = run.served
    if not _only_the_head_is_missing(run):
        yield from _checks(run, "keys-known-and-complete")
    yield from _checks(run, "keys-as-the-engine-loads-them", "keys-in-one-spelling", "shapes-fit-the-config",
                       "architecture-known", "belongs-to-the-verifier", "values-finite")
    for pattern in (r"Following weights were not initialized.*", r"There is no module or parameter named \S+"):
        if said := run.log.says(pattern):
            yield Item(FOUND, f"the engine's log: {said[:200]}", EXPORT_AGAIN)
    yield from _config(run, lambda key: key not in (*_ID_KEYS, *_POSITION_KEYS, *_NORM_KEYS, *_HEAD_KEYS))
    yield from _weights(run, lambda name: name not in (*_HEAD, EMBEDDING))
    if run.reference is None:
        yield Item(REMAINS, "the checkpoint that it was exported from is not there to be compared",
                   "export again from 04_train/checkpoints/best with 05_fix_weight_keys.py")
    else:
        yield Item(OUT, f"{len(served.tensors)} tensors, known names, bit by bit those of "
                   f"{run.reference.folder.resolve().name}")


def compile_cache(run: Run) -> Evidence:
    """a compile cache from before the ids changed"""
    if run.served.engine != "vllm":
        yield Item(OUT, "SGLang keeps no such cache")
    elif run.served.version and versions.numbers(run.served.version) >= (0, 17, 0):
        yield Item(OUT, f"vLLM {run.served.version} hashes the drafter's config into its key")
    elif run.log.eager or arguments.given(run.arguments, "--enforce-eager"):
        yield Item(OUT, "nothing was compiled (eager mode)")
    elif (run.option("engine", "env") or {}).get("VLLM_DISABLE_COMPILE_CACHE") == "1":
        yield Item(OUT, "the cache was off (VLLM_DISABLE_COMPILE_CACHE=1)")
    elif run.log.text and not run.log.says("Directly load the"):
        yield Item(OUT, "the engine's log: nothing was loaded from a cache")
    else:
        cache = run.log.says(r"Using cache directory: (\S+) for") or "~/.cache/vllm/torch_compile_cache"
        said = "graphs came from a cache" if run.log.text else "there is no log of the engine"
        yield Item(REMAINS, f"vLLM {run.served.version or '?'} does not see that ids have changed; {said}",
                   f"rm -r {cache}, or set VLLM_DISABLE_COMPILE_CACHE=1 in engine.env, and measure again")


def positions(run: Run) -> Evidence:
    """RoPE, or positions beyond the drafter's"""
    yield from _config(run, lambda key: key == "rope_parameters")
    yield from _checks(run, "rope-spellings-agree", "rope-as-trained")
    own, wanted = run.served.flat["max_position_embeddings"], run.served.serving_length
    longest = max((len(prompt) + len(reply) for prompt, reply in run.replies), default=0)
    if own < wanted:
        reach = f"measured sequences reach {longest}" if longest > own else "no measured sequence is longer"
        yield Item(FOUND, f"max_position_embeddings is {own} for a serving length of {wanted}, and the engine drafts "
                   f"nothing, or garbage, beyond; {reach}", EXPORT_AGAIN)
    rope = run.served.flat["rope_parameters"]
    yield Item(OUT, f"theta {rope['rope_theta']:g}, {rope['rope_type']}; {own} positions, {longest} measured")


def norm_flags(run: Run) -> Evidence:
    """norm flags"""
    yield from _config(run, lambda key: key in _NORM_KEYS)
    yield from _checks(run, "norm-flags-served", "norm-flags-match-training")
    said = [name for name in NORM_FLAGS if run.served.flat[name]]
    yield Item(OUT, ", ".join(said) or "all false")


def head_and_mapping(run: Run) -> Evidence:
    """lm_head and d2t missing or wrong"""
    fix = "ship lm_head.weight, d2t and t2d of the training: " + EXPORT_AGAIN
    absent = [name for name in _HEAD[: 3 if run.served.reduced else 1] if name not in run.served.canonical]
    if absent:
        yield Item(FOUND, f"{', '.join(absent)} missing", fix)
    if run.served.reduced and run.log.says("without its own lm_head"):
        yield Item(FOUND, "the engine's log: no lm_head of its own, the verifier's is shared", fix)
    yield from _checks(run, "mapping-types", *(["mapping-consistent"] if not absent else []))
    yield from _config(run, lambda key: key in _HEAD_KEYS)
    yield from _weights(run, lambda name: name in _HEAD and name not in absent)
    yield Item(OUT, "there" + ", bit by bit those of the training" * (run.reference is not None))


def temperature(run: Run) -> Evidence:
    """temperature"""
    sent = ((run.main or {}).get("sampling") or {}).get("sent") or {}
    options = run.option("benchmark", "temperature")  # a list of what was measured; once a number
    fallback = min(options, default=None) if isinstance(options, list) else options
    asked = sent.get("temperature", (run.main or {}).get("temperature", fallback))
    if asked is None:
        yield Item(REMAINS, "the temperature was not recorded", "measure at --temperature 0")
    elif asked > 0 and not run.figures("predicted"):
        yield Item(FOUND, f"measured at temperature {asked:g}; training's figure is for greedy output",
                   "measure at --temperature 0 first: sampled tokens are accepted less often by nature")
    elif asked > 0:  # both were sampled: the temperature lies between the prediction and training's figure
        status = FOUND if run.predicted_low else OUT
        yield Item(status, f"measured and predicted at temperature {asked:g}; training's figure is for greedy output",
                   "measure at --temperature 0 first: sampled tokens are accepted less often by nature")
    else:
        yield Item(OUT, "measured at 0")


def prompts_and_data(run: Run) -> Evidence:
    """tokenizer, chat template or prompts unlike the training's"""
    yield from _verifier_changes(run)
    if not run.replies or not run.traces:
        yield Item(REMAINS, "no token ids of measured replies and of traces to compare",
                   "measure with an engine that returns token ids; keep 01_traces/traces.jsonl")
        return
    for end in (False, True):
        theirs, ours = edge_shares(run.replies, run.traces, end=end)
        how = "end" if end else "begin"
        if ours >= _TYPICAL and theirs < _TYPICAL:
            yield Item(FOUND, f"{theirs:.0%} of the measured prompts {how} with the tokens that traces' prompts {how} "
                       f"with ({ours:.0%} of those do): not the chat format of the training",
                       "serve the verifier with the chat template of the traces, and ask through it")
        elif ours >= _TYPICAL:
            yield Item(OUT, f"{theirs:.0%} of the prompts {how} as the traces' do")
    yield from _unlike(run)


def _verifier_changes(run: Run) -> Evidence:
    """Yield what the hashes say that stages 01 and 06 recorded of the verifier's folder."""
    kinds = {"the tokenizer": lambda name: "token" in name or name in ("vocab.json", "merges.txt", "tokenizer.model"),
             "the chat template": lambda name: name.startswith("chat_template"),
             "the verifier itself": lambda name: name == "config.json" or name.endswith(".safetensors")}
    if "" in run.model_changes:
        yield Item(REMAINS, "no record of the verifier's files", "compare tokenizer and template with those of the "
                   "traces by hand")
        return
    for what, belongs in kinds.items():
        if names := [f"{name} ({how})" for name, how in run.model_changes.items() if belongs(name)]:
            yield Item(FOUND, f"{what} that was served is not the one that the training data came from: "
                       + ", ".join(names), "serve the folder with which traces and states were made, or make them anew")
    yield Item(OUT, "tokenizer, template and weights are those of the traces")


def _unlike(run: Run) -> Evidence:
    """Yield what sets the measured replies apart from the traces; a cause only if the prediction is low too."""
    status = FOUND if run.predicted_low else OUT
    pairs, expected = pair_shares(run.replies, run.traces)
    text = f"{pairs.value:.0%} of the replies' token pairs occur in traces, {expected.value:.0%} of held-out traces'"
    yield Item(status if pairs.below(expected, _DROP) else OUT, text, "train on prompts like those that are served")
    source = run.reference or run.served
    held_out = run.made["03_vocab"].get("held_out_coverage")
    if held_out is not None and "t2d" in source.canonical:
        marks = b"".join(tensor_files.blocks(source.canonical["t2d"]))
        share = coverage(run.replies, {token for token, marked in enumerate(marks) if marked})
        text = f"the draft vocabulary holds {share.value:.0%} of the replies' tokens, {held_out:.0%} of unseen traces'"
        yield Item(status if share.below(Mean(held_out, 0.0), _DROP) else OUT, text,
                   "take a larger --draft-vocab-size, or traces like what is served")
    past, longest = beyond(run.replies, run.traces)
    yield Item(status if past > _DROP else OUT, f"{past:.0%} of the replies' tokens lie beyond the longest trace "
               f"({longest} tokens)", "train on replies as long as those that are served")


def fused_all_reduce(run: Run) -> Evidence:
    """SGLang's fused all-reduce (up to 0.5.10)"""
    version, flag = run.served.version, "--enforce-disable-flashinfer-allreduce-fusion"
    fix = f"add {flag} to engine.args, or take 0.5.11 or newer"
    if run.served.engine != "sglang":
        yield Item(OUT, f"the engine is {run.served.engine}")
    elif arguments.given(run.arguments, flag):
        yield Item(OUT, f"{flag} was given")
    elif run.option("engine", "tensor_parallel_size") == 1 and not run.attached:
        yield Item(OUT, "one GPU: nothing is reduced")
    elif version and versions.numbers(version) >= (0, 5, 11):
        yield Item(OUT, f"SGLang {version} captures after the reduction")
    else:
        yield Item(FOUND if version and not run.attached else REMAINS,
                   f"SGLang {version or '(version not told)'} captures states before the reduction", fix)


def prefix_cache(run: Run) -> Evidence:
    """prefix caching that pollutes the draft KV cache"""
    lengths = [run_["acceptance"]["length"] for run_ in run.measured if run.main
               and run_["draft_tokens"] == run.main["draft_tokens"]]
    falls = len(lengths) > 1 and lengths[0] - lengths[-1] > 0.03
    order = " → ".join(f"{length:.2f}" for length in lengths)
    if run.log.prefix_caching is False or (not run.attached and run.log.prefix_caching is None):
        yield Item(OUT, "it was off" + (" (engine's log)" if run.log.prefix_caching is False else ""))
    elif run.log.prefix_caching and falls:
        yield Item(FOUND, f"it was on, and acceptance fell in the order of measurement: {order}", "restart with it off")
    else:
        yield Item(REMAINS, "it was on" if run.log.prefix_caching else "the attached server may have it on",
                   "restart the server with --no-enable-prefix-caching (SGLang: --disable-radix-cache), measure again")


# --- what several causes ask ------------------------------------------------------------------------------


def _checks(run: Run, *names: str) -> Evidence:
    """Yield the static checks of these names that did not pass on the served folder."""
    for name in names:
        finding = run.findings.get(name)  # of a large drafter not all weights are read
        if finding and finding.status in (FAIL, WARN):
            expected = f"; expected {finding.expected}" * bool(finding.expected)
            yield Item(FOUND if finding.status == FAIL else REMAINS, f"{name}: {finding.found}{expected}", finding.fix)


def _config(run: Run, belongs: Callable[[str], bool]) -> Evidence:
    """Yield values of the served config that stage 05 would not write for the checkpoint."""
    for key, (served, wanted) in run.config_changes.items():
        if belongs(key) and key != "max_position_embeddings":  # a larger one is right
            yield Item(FOUND, f"config.json: {key} {_short(served)}; of the training {_short(wanted)}", EXPORT_AGAIN)


def _weights(run: Run, belongs: Callable[[str], bool]) -> Evidence:
    changes = [f"{name}: {how}" for name, how in sorted(run.weight_changes.items()) if belongs(name)]
    if changes:
        more = f" and {len(changes) - 4} more" * (len(changes) > 4)
        yield Item(FOUND, f"not the checkpoint's: {', '.join(changes[:4])}{more}", EXPORT_AGAIN)


def _only_the_head_is_missing(run: Run) -> bool:
    """Say whether the keys fit but for lm_head and the mapping, which are a cause of their own."""
    have = run.served.canonical.keys()
    missing = {*REQUIRED, *(MAPPING if run.served.reduced else ())} - have
    unknown = [name for name in run.weight_changes if run.weight_changes[name] == NOT_TRAINED
               and canonical_key(name) != EMBEDDING]
    return bool(missing) and missing <= set(_HEAD) and not unknown


def _engine(run: Run) -> str:
    return f"{run.served.engine} {run.served.version or '(version not told)'}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "…"


CAUSES: tuple[Callable[[Run], Evidence], ...] = (
    auxiliary_ids, embedding, loader, compile_cache, positions, norm_flags, head_and_mapping, temperature,
    prompts_and_data, fused_all_reduce, prefix_cache,
)  # fmt: skip
# What a cause holds down: the measurement only, or the prediction as well, which reads the same files and replies.
ENGINE_SIDE = (auxiliary_ids, compile_cache, norm_flags, fused_all_reduce, prefix_cache)
