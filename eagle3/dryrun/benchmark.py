"""The dry run of stage 06: which servers would be started, what they would be asked, memory and time."""

from typing import Any

from eagle3.benchmark import matrix, measurements, prediction
from eagle3.benchmark.matrix import Cell, ServerKind
from eagle3.benchmark.plan import STALE_ON, MeasurementPlan, endpoint_of, make_plan, options_of_all, server_words
from eagle3.common import files, manifest
from eagle3.common.log import duration, logger
from eagle3.common.options import BenchmarkOptions
from eagle3.common.stage import Stage
from eagle3.dryrun import estimates
from eagle3.dryrun.dry_run import DryRun
from eagle3.engines import speculation


def describe(options: BenchmarkOptions, stage: Stage) -> MeasurementPlan:
    """Print what a run would start and ask; return what it would measure."""
    section, dry = options.benchmark, DryRun(stage, options.model.path)
    plan = make_plan(options, stage, dry)
    kept = _kept(options, stage, plan)
    missing = plan.matrix.all_missing(kept)
    absent = "" if not plan.drafter or plan.drafter.exists() else ", which has not been exported yet"
    control = f", control {plan.control}" if plan.control else ""
    for each in plan.sets.values():
        dry.say("reads", f"prompt set {each.name}: {len(each.prompts)} prompts of {each.path} ({each.about})")
    dry.say("", f"verifier {plan.model}, drafter {plan.drafter or 'of the attached server'}{absent}{control}")
    count, requests = sum(map(len, missing.values())), sum(_requests(plan, cells) for cells in missing.values())
    done = sum(len(list(plan.matrix.cells(kind))) for kind in missing) - count
    dry.say("asks", f"{count} measurements{f' ({done} are done)' * bool(done)}: {requests} requests, at most "
            f"{requests * section.max_tokens:,} tokens (estimate); writes {stage.directory}")
    if options.engine.kind == "sglang":
        dry.say("", "each of them twice: SGLang tells its counters and token ids only where it does not stream")
    dry.say("engine", f"{options.engine.kind} {plan.inputs['engine']}")
    started = [kind for kind, cells in missing.items() if cells and not endpoint_of(options, kind)]
    for kind in started:
        asked = f"{len(missing[kind])} measurements, {_requests(plan, missing[kind])} requests"
        dry.say("starts", f"{kind.name} ({asked}): {dry.server(options.engine, *server_words(options, plan, kind))}")
    longest, most = section.max_tokens, max(section.concurrency)
    dry.memory(options.engine, prefill=8192, cached=most * longest, why=f"{most} requests of {longest:,}")
    captures = 1 if plan.capture else 0
    if captures:
        _walk(options, plan, dry)
    loads = len(started) + captures
    what = f"{loads} loads of the verifier ({len(started)} servers, {captures} for the prediction)"
    if dry.known:
        dry.time(loads * dry.known.load_s, f"{what}, {duration(dry.known.load_s)} each as in {dry.known.name}; without "
                 f"the {requests} requests")
    else:
        dry.say("time", f"{what}, and {requests} requests; their rates are not known for this model")
    measured = [run for run in kept if plan.matrix.shown(run) and run.get("tokens_per_s")]
    if measured and count:
        _say_time(dry, plan, missing, measured, section.max_tokens)
    dry.end()
    return plan


def _requests(plan: MeasurementPlan, cells: list[Cell]) -> int:
    return sum(len(plan.sets[cell.prompts].prompts) for cell in cells)


def _kept(options: BenchmarkOptions, stage: Stage, plan: MeasurementPlan) -> list[dict[str, Any]]:
    """Return what is measured already and would be kept, without changing anything there."""
    if options.common.restart or not (stage.directory / "manifest.json").exists():
        return []
    previous = manifest.read(stage.directory)
    basis = previous.get("fingerprint_basis", {})
    if any(name in matrix.AXES for name in basis):
        logger.info("what an earlier version measured in %s is not counted here; a run keeps it", stage.directory)
        return []
    now = options_of_all(options)
    for name in STALE_ON:
        identity = plan.inputs[name]
        now[f"input {name}"] = identity if isinstance(identity, str) else files.sha256_json(identity)
    return measurements.kept(stage.directory, files.sha256_json(now))


def _say_time(dry: DryRun, plan: MeasurementPlan, missing: dict[ServerKind, list[Cell]],
              measured: list[dict[str, Any]], longest: int) -> None:
    """Print how long the requests take at the rates of what is measured, each of the same number in flight."""
    rates = {run["concurrency"]: run["tokens_per_s"] for run in measured}
    nearest = {cell.concurrency: min(rates, key=lambda known, c=cell.concurrency: abs(known - c))  # type: ignore[misc]
               for cells in missing.values() for cell in cells}
    seconds = sum(len(plan.sets[cell.prompts].prompts) * longest / rates[nearest[cell.concurrency]]
                  for cells in missing.values() for cell in cells)
    dry.time(seconds, "the requests, at most, at the tokens/s of what is measured already")


def _walk(options: BenchmarkOptions, plan: MeasurementPlan, dry: DryRun) -> None:
    """Print what the prediction captures and what its walk takes, or why it would be refused."""
    section = options.benchmark
    words = [*options.engine.args, *section.serve_args]
    found = speculation.settings(options.engine.kind, words, options.engine.env)
    reasons = {each: speculation.refusal(options.engine.kind, found, each) for each in section.temperature}
    if not section.drafter_endpoint:
        for temperature, reason in reasons.items():
            if reason:
                dry.say("", f"predicts nothing at temperature {temperature:g}: {reason}")
        if all(reasons.values()):
            return
    # Greedy replies are mostly the same for all draft-token counts.
    times = sum(len(section.draft_tokens) if each > 0 else 1 for each in section.temperature)
    tokens = sum(len(each.prompts) for each in plan.sets.values()) * section.max_tokens * times
    depth = max(prediction.DEPTH, *section.draft_tokens)
    line = f"the states of at most {tokens:,} generated tokens and their prompts"
    config = plan.drafter / "config.json" if plan.drafter else None
    if dry.facts and config and config.exists():
        size = files.read_json(config).get("draft_vocab_size")
        if size:
            flops = estimates.drafter(dry.facts, int(size)).walk_flops(tokens, depth)
            took = " or ".join(f"{duration(flops / rate)} on {where}" for where, rate in estimates.WALK_RATES.items())
            line += (f", walked once for 1 to {depth} draft tokens in at most {took} ({flops:.2g} operations if every "
                     "draft were right; about a fifth if the length is 3)")
    dry.say("predict", f"{line} (estimate)")
