"""The dry run of stage 01: which prompts would be asked of which server, and what that takes."""

from pathlib import Path

from eagle3.common.log import size
from eagle3.common.options import GenerateOptions
from eagle3.common.stage import Stage
from eagle3.dryrun.dry_run import DryRun
from eagle3.traces.endpoints import Pool
from eagle3.traces.prompts import PromptSource
from eagle3.traces.sampling import Mix
from eagle3.traces.serving import server_arguments
from eagle3.traces.trace_rows import Ledger
from eagle3.traces.worklist import CHARACTERS_PER_TOKEN, Survey, Worklist


def describe(options: GenerateOptions, stage: Stage, mix: Mix) -> None:
    """Print what would be done; fail where the run would."""
    section, dry = options.generate, DryRun(stage, options.model.path)
    ledger = Ledger(stage.directory, read=not options.common.restart)
    survey = survey_for(dry, options, ledger, mix)
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
        tokens = survey.missing * dry.known.tokens_per_sample
        dry.time(dry.known.trace_seconds(tokens), f"{tokens:,} tokens, {dry.known.tokens_per_sample:,} a sample and "
                 f"{dry.known.tokens / dry.known.trace_s:,.0f} tok/s as in {dry.known.name}, without loading")
    dry.end()


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
