"""The dry run of stage 01: which prompts would be asked of which server, and what that takes."""

import math
from dataclasses import dataclass
from pathlib import Path

from eagle3.common.log import size
from eagle3.common.options import GenerateOptions
from eagle3.common.stage import Stage
from eagle3.dryrun import estimates
from eagle3.dryrun.dry_run import DryRun
from eagle3.traces.chat import load_chat
from eagle3.traces.endpoints import Pool
from eagle3.traces.inventing import turns_of
from eagle3.traces.prompts import PromptSource
from eagle3.traces.sampling import Mix
from eagle3.traces.self_prompts import Plan, Record
from eagle3.traces.serving import server_arguments
from eagle3.traces.trace_rows import Ledger
from eagle3.traces.worklist import CHARACTERS_PER_TOKEN, Survey, Worklist


def describe(options: GenerateOptions, stage: Stage, mix: Mix, plan: Plan | None = None) -> None:
    """Print what would be done; fail where the run would. `plan`: the prompts that the verifier is to invent."""
    section, dry = options.generate, DryRun(stage, options.model.path)
    ledger = Ledger(stage.directory, read=not options.common.restart, ask_again=section.ask_again)
    own = invented(dry, options, plan) if plan else Invented()
    survey = own.survey or survey_for(dry, options, ledger, mix)
    dry.say("reads", f"{section.prompts}: {survey.expected:,} prompts, {survey.missing:,} of them to ask")
    dry.say("writes", f"{stage.directory}; estimate: {survey.prompt_tokens:,} prompt tokens ({CHARACTERS_PER_TOKEN} "
            f"characters a token), at most {survey.tokens:,} generated tokens, at most {size(survey.bytes)}")
    if section.serve:
        describe_server(dry, options)
    else:
        dry.say("asks", ", ".join(section.endpoint) + f", {section.concurrency} requests at a time")
        with dry.only_there("server"):
            name = Pool(section.endpoint, section).connect(("", "")).name
            ledger.refuse_other_model(name)
            dry.say("", f"they serve {name}")
    dry.disk(stage.directory, survey.bytes, "the traces")
    if dry.known:
        tokens = survey.missing * dry.known.tokens_per_sample + own.tokens
        dry.time(dry.known.trace_seconds(tokens), f"{tokens:,} tokens, {dry.known.tokens_per_sample:,} a sample and "
                 f"{dry.known.tokens / dry.known.trace_s:,.0f} tok/s as in {dry.known.name}, without loading")
    dry.end()


@dataclass(frozen=True)
class Invented:
    """What the prompts that are yet to be invented take.

    Attributes:
        survey: of the replies to them; None where all are there already. tokens: generated to invent them.
    """

    survey: Survey | None = None
    tokens: int = 0


def invented(dry: DryRun, options: GenerateOptions, plan: Plan) -> Invented:
    """Print what inventing prompts takes; return it. Those that are there become the source of the options."""
    section, folder = options.generate, dry.stage.directory
    record = Record(plan, folder, read=not options.common.restart)
    if record.complete:
        section.prompts = str(record.prompts)
        dry.say("prompts", f"{plan.count:,} of {section.prompts}, which are there")
        return Invented()
    if dry.elsewhere:
        dry.say("invents", f"{plan.count:,} prompts after the template up to where the user speaks")
    else:
        chat = load_chat(Path(options.model.path), trust_remote_code=options.model.trust_remote_code)
        ids = turns_of(plan, chat)[0].ids
        dry.say("invents", f"{plan.count:,} prompts after {len(ids)} tokens of the template: {chat.decode(ids)!r}")
    attempts = max(0, math.ceil(plan.count / estimates.USABLE_PROMPTS) - len(record.attempts))
    tokens = attempts * estimates.INVENTED_TOKENS
    dry.say("", f"estimate: {attempts:,} attempts ({estimates.USABLE_PROMPTS:.0%} usable and "
            f"{estimates.INVENTED_TOKENS} tokens each, cut ones included, as SmolLM2's), {tokens:,} tokens, at most "
            f"{attempts * plan.tokens[1]:,}; {len(plan.held_out):,} held-out prompts are kept away")
    characters = plan.count * estimates.INVENTED_TOKENS * CHARACTERS_PER_TOKEN
    return Invented(Survey(expected=plan.count, missing=plan.count, characters=characters,
                           tokens=plan.count * section.max_tokens), tokens)


def survey_for(dry: DryRun, options: GenerateOptions, ledger: Ledger, mix: Mix) -> Survey:
    """Return the survey of the prompts; where they are not here either, of as many as the reference run had."""
    section, stage = options.generate, dry.stage
    if dry.elsewhere and dry.known and not Path(section.prompts).exists() and not dry.named("--prompts"):
        count = min(dry.known.samples, options.common.limit or dry.known.samples)
        dry.not_here(f"prompts: {section.prompts}; planned for {count:,}, as many as in {dry.known.name}")
        return Survey(expected=count, missing=count, tokens=count * section.max_tokens)
    source = PromptSource(section, options.common.limit)
    dry.say("prompts", source.scan(stage.check_stop).line())
    return Worklist(source, mix, ledger).look_over(section.served_model_name, stage.check_stop)


def describe_server(dry: DryRun, options: GenerateOptions) -> None:
    """Print how --serve would start the engine, and its memory."""
    section = options.generate
    dry.say("engine", dry.engine(options.engine))
    dry.say("starts", dry.server(options.engine, server_arguments(options)))
    each = dry.known.tokens_per_sample if dry.known else section.max_model_len or section.max_tokens
    dry.memory(options.engine, prefill=8192, cached=section.concurrency * each,
               why=f"{section.concurrency} requests of {each:,}")
