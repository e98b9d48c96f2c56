"""The dry run of stage 06: which servers would be started, what they would be asked, memory and time."""

from eagle3.benchmark import prediction
from eagle3.benchmark.plan import MeasurementPlan, make_plan, name_of, server_words
from eagle3.common import files
from eagle3.common.log import duration
from eagle3.common.options import BenchmarkOptions
from eagle3.common.stage import Stage
from eagle3.dryrun import estimates
from eagle3.dryrun.dry_run import DryRun
from eagle3.engines import speculation


def describe(options: BenchmarkOptions, stage: Stage) -> MeasurementPlan:
    """Print what a run would start and ask; return what it would measure."""
    section, dry = options.benchmark, DryRun(stage, options.model.path)
    plan = make_plan(options, stage, dry)
    requests = len(plan.prompts) * len(plan.counts) * len(section.concurrency)
    missing = "" if not plan.drafter or plan.drafter.exists() else ", which has not been exported yet"
    dry.say("reads", f"{len(plan.prompts)} prompts of {section.prompts}; verifier {plan.model}, drafter "
            f"{plan.drafter or 'of the attached server'}{missing}")
    dry.say("asks", f"{requests} requests, at most {requests * section.max_tokens:,} tokens (estimate); writes "
            f"{stage.directory}")
    dry.say("engine", plan.inputs["engine"])
    started = [count for count in plan.counts
               if not (section.drafter_endpoint if count else section.baseline_endpoint)]
    for count in started:
        dry.say("starts", f"{name_of(count)}: {dry.server(options.engine, *server_words(options, plan, count))}")
    longest, most = section.max_tokens, max(section.concurrency)
    dry.memory(options.engine, prefill=8192, cached=most * longest, why=f"{most} requests of {longest:,}")
    captures = 1 if plan.capture else 0
    if captures:
        _walk(options, plan, dry)
    if dry.known:
        loads = len(started) + captures
        dry.time(loads * dry.known.load_s, f"{loads} loads of the verifier ({len(started)} servers, {captures} for the "
                 f"prediction), {duration(dry.known.load_s)} each as in {dry.known.name}; without the requests")
    dry.end()
    return plan


def _walk(options: BenchmarkOptions, plan: MeasurementPlan, dry: DryRun) -> None:
    """Print what the prediction captures and what its walk takes, or why it would be refused."""
    section = options.benchmark
    words = [*options.engine.args, *section.serve_args]
    found = speculation.settings(options.engine.kind, words, options.engine.env)
    reason = speculation.refusal(options.engine.kind, found, section.temperature)
    if reason and not section.drafter_endpoint:
        dry.say("", f"predicts nothing: {reason}")
        return
    sets = len(section.draft_tokens) if section.temperature > 0 else 1  # greedy replies are mostly the same
    tokens = len(plan.prompts) * section.max_tokens * sets
    depth = max(prediction.DEPTH, *section.draft_tokens)
    line = f"the states of at most {tokens:,} generated tokens and their prompts"
    config = plan.drafter / "config.json" if plan.drafter else None
    if dry.facts and config and config.exists():
        size = files.read_json(config).get("draft_vocab_size")
        if size:
            flops = estimates.drafter(dry.facts, int(size)).walk_flops(tokens, depth)
            times = " or ".join(f"{duration(flops / rate)} on {where}" for where, rate in estimates.WALK_RATES.items())
            line += (f", walked once for 1 to {depth} draft tokens in at most {times} ({flops:.2g} operations if every "
                     "draft were right; about a fifth if the length is 3)")
    dry.say("predict", f"{line} (estimate)")
